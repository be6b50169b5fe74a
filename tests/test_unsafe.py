"""What could run a stranger's code or open a port stands nowhere in the product, except where a
reason is given here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {
    # SGLang's rendezvous; on the loopback unless learner.publish_host names an address
    ("learner/model/weight_server.py", "TCPStore"),
    # the other end of the same; every answer is checked against the run's token
    ("actors/engines/sglang_transport.py", "TCPStore"),
    ("common/process.py", "multiprocessing"),  # a pipe between a process and its own child
    # the same, and the server's socket in a folder that only this user may open
    ("tools/launching/forks.py", "multiprocessing"),
}
MODULES = {*"pickle cPickle dill cloudpickle joblib marshal shelve multiprocessing".split()}
NAMES = set(
    "eval exec compile __import__ ForkingPickler TCPStore broadcast_object_list all_gather_object"
    " gather_object scatter_object_list send_object_list init_rpc os.system os.popen torch.load"
    " torch.save yaml.load recv_pyobj send_pyobj".split()
)
KEYWORDS = {"shell", "allow_pickle", "trust_remote_code", "weights_only"}


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from {node.module.split(".")[0]} & MODULES
            yield from {alias.name for alias in node.names} & NAMES
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            methods = NAMES - {"eval", "exec", "compile"}
            yield from {name} & NAMES | {name.rpartition(".")[2]} & methods
            for keyword in node.keywords:
                safe = keyword.arg == "weights_only"
                if keyword.arg in KEYWORDS and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is safe
                ):
                    yield f"{keyword.arg}="


def used() -> set[tuple[str, str]]:
    rooms = ("actors", "judges", "learner", "scheduler", "tools", "wire", "common")
    every = [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    files = [path for path in every if path.suffix == ".py"]
    files += [path for path in every if not path.suffix and path.read_bytes()[:2] == b"#!"]
    assert len(files) > 200
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}
    return {(name, danger) for name, tree in trees.items() for danger in dangers(tree)}


@pytest.mark.slow
def test_no_pickle_no_evaluated_text_and_no_open_store_without_a_reason() -> None:
    assert used() == ALLOWED


def test_the_search_finds_each_of_them() -> None:
    planted = {
        "import pickle": "pickle",
        "from torch.distributed import TCPStore": "TCPStore",
        "torch.load('x')": "torch.load",
        "np.load('x', allow_pickle=True)": "allow_pickle=",
    }
    for line, danger in planted.items():
        assert list(dangers(ast.parse(line))) == [danger], line
    for line in ("model.eval()", "f(trust_remote_code=False)"):
        assert not list(dangers(ast.parse(line))), line
