"""The games of GEM (``pip install gem-llm``), with all that was said so far in view, as the games
themselves expect."""

from typing import Any


class Gem:
    """id: such as "game:GuessTheNumber-v0-easy"; the other arguments are those of ``gem.make``."""

    def __init__(self, id: str, **arguments: Any):
        import gem  # pyright: ignore[reportMissingImports]

        self.environment = gem.make(id, **arguments)
        self.said: list[str] = []

    def begin(self, seed: int) -> str:
        """Reset the game."""
        observation, known = self.environment.reset(seed=seed)
        return self._shown(observation, known)

    def turn(self, action: str) -> tuple[str, float, bool]:
        """Play an action, which GEM reads in \\boxed{}."""
        boxed = action if "\\boxed{" in action else f"\\boxed{{{action}}}"
        observation, reward, terminated, truncated, known = self.environment.step(boxed)
        self.said.append(f"> {boxed}")
        return self._shown(observation, known), reward, terminated or truncated

    def _shown(self, observation: str, known: dict[str, Any]) -> str:
        self.said.append(observation.strip())
        return "\n".join([*self.said, known.get("suffix", "")]).strip()
