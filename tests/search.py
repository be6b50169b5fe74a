"""A search for whole runs with an untrained policy, named "tests.search:AnySearch" in data.environment."""

from actors.environments.base import Action
from actors.environments.search_qa import SearchQA, State

SEARCHES = 2


class AnySearch(SearchQA):
    """Every text asks the question itself of the retriever, and from the third turn on is an answer: a random policy writes neither."""

    def read(self, state: State, text: str) -> Action:
        """Always valid."""
        if len(state.steps) < SEARCHES:
            return Action("search", text, think="", query=state.question)
        return Action("answer", text, think="", answer=text)
