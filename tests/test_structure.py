# SPDX-License-Identifier: Apache-2.0
"""The layers of docs/explanation/architecture.md: the rooms (a folder or one module), which of them
may use which, and where names may appear. `__init__` and `__main__` do not count.
"""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from serving import protocol
from serving.lifecycle import GRACE_S, SHUTDOWN

ROOT = Path(__file__).parent.parent
ARCHITECTURE = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
MOST = 10  # modules of a room


def modules(folder: str) -> dict[str, Path]:
    """Name → file."""
    files = (ROOT / folder).rglob("*.py")
    return {
        ".".join(it.relative_to(ROOT).with_suffix("").parts): it
        for it in sorted(files)
        if it.stem not in ("__init__", "__main__")
    }


SERVING = modules("serving")
CONFIGURATION = modules("lmi_config")
TOOLS = modules("tools")
ROOMS = SERVING | CONFIGURATION
EVERY = ROOMS | modules("handlers")
GROUND = ("serving", "serving.router")
"""Folders whose own files are separate rooms."""


def room(module: str) -> str:
    folder = module.rpartition(".")[0]
    return module if folder in GROUND else folder


def imported(file: Path) -> Iterator[str]:
    """The names of all modules that a file imports, at any place in it."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (it.name for it in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in EVERY else node.module


def arrows() -> dict[str, set[str]]:
    """Room → the rooms that it uses."""
    found: dict[str, set[str]] = {room(it): set() for it in ROOMS}
    for module, file in ROOMS.items():
        used = {room(it) for it in imported(file) if it in ROOMS}
        found[room(module)] |= used - {room(module)}
    return found


def floors() -> list[str]:
    """Rooms from the top layer to the bottom layer, in the order of the page's table."""
    table = ARCHITECTURE.partition("\n## Modules\n")[2].partition("\n## ")[0]
    names = re.findall(r"^\| `((?:serving|lmi_config)/[\w/]+?)(?:/|\.py)` \|", table, re.MULTILINE)
    return [it.replace("/", ".") for it in names]


def test_there_is_no_circle():
    TopologicalSorter(arrows()).prepare()


def test_every_room_is_on_a_floor_and_arrows_point_down():
    floor = {name: n for n, name in enumerate(floors())}
    assert floor.keys() == arrows().keys()
    up = {(one, other) for one, used in arrows().items() for other in used}
    assert {it for it in up if floor[it[0]] > floor[it[1]]} == set()


def test_rooms_are_small():
    count: dict[Path, int] = {}
    for file in (ROOMS | TOOLS).values():
        count[file.parent] = count.get(file.parent, 0) + 1
    assert {folder: n for folder, n in count.items() if n > MOST} == {}


@pytest.mark.parametrize(
    ("library", "home"),
    [
        ("vllm", ("serving.engine.",)),
        (
            "lmcache",
            (
                *("serving.kv_cache.lmcache.", "serving.kv_cache.patches."),
                *("serving.engine.kv_connector", "serving.engine.patches."),
            ),
        ),
    ],
)
def test_a_library_is_used_in_its_room_only(library, home):
    users = {
        module
        for module, file in EVERY.items()
        if any(it == library or it.startswith(f"{library}.") for it in imported(file))
    }
    assert users
    assert {it for it in users if not it.startswith(home)} == set()


OF_TOOLS = {
    "bench": {"harness", "models", "routing_sim"},  # whose chains are as the router makes them
    "ceiling": {"bench", "harness", "models"},  # plain vLLM, as the benchmarks start it
    "chaos": {"harness", "models"},
    "routing_sim": set(),
    "sagemaker_local": set(),
    "hyperpod_local": {"harness", "models"},
    "generate": {"engines"},  # the patches of all processes
    "engines": set(),
    "prose": set(),
    "rehearsal": set(),
    "release": set(),
}
"""Room of tools/ → the other rooms that it may use, and those of tests/support/."""


def test_rooms_of_tools_stand_on_the_harness_and_not_on_each_other():
    for file in (ROOT / "tools").rglob("*.py"):
        here = file.relative_to(ROOT / "tools").parts[0]
        used = {tuple(it.split(".")) for it in imported(file)}
        of_tests = {it for it in used if it[0] == "tests"}
        assert all(it[1] == "support" for it in of_tests), file
        others = {it[1] for it in used if it[0] == "tools"} - {here}
        assert others | {it[2] for it in of_tests} <= OF_TOOLS[here], file


STARTS_PROCESSES = {"Popen", "create_subprocess_exec", "create_subprocess_shell"}
MAY_START_PROCESSES = {
    "tools.sagemaker_local.container",  # SageMaker's part: it runs containers
    "tools.chaos.watch",  # a client
    "tools.ceiling.profile",  # py-spy, which samples a server
    "tools.engines.trial",  # pytest
}


def test_only_the_harness_starts_servers():
    found = {
        module
        for module, file in (TOOLS | modules("tests/support")).items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in STARTS_PROCESSES
    }
    assert {
        it for it in found if not it.startswith("tests.support.harness.")
    } == MAY_START_PROCESSES


def test_rooms_of_tools_are_described():
    table = ARCHITECTURE.partition("\n## Modules\n")[2].partition("\n## ")[0]
    assert {*re.findall(r"^\| `tools/(\w+)/` \|", table, re.MULTILINE)} == {*OF_TOOLS}


def texts(file: Path) -> Iterator[str]:
    """The literals of a file that are not docstrings."""
    tree = ast.parse(file.read_text())
    documentation = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in documentation:
            if isinstance(node.value, bytes):
                yield node.value.decode("latin-1")
            elif isinstance(node.value, str):
                yield node.value


PATHS = (
    *(protocol.PING, protocol.METRICS, protocol.REPLICAS, protocol.KV_EVENT_SOURCES),
    *(protocol.EXECUTION_PARAMETERS, "/v1", "/adapters", "/invocations", "/predictions"),
)
WIRE = re.compile(
    "[Xx]-[Aa]mzn|x-request-id|x-session-id|^("
    + "|".join(re.escape(it) for it in PATHS)
    + r")(?![\w-])"
)
LMCACHES = ("serving.kv_cache.cache_server", "/metrics")
"""Its server's own path."""


def test_names_of_the_wire_stand_in_one_place():
    found = {
        (module, text)
        for module, file in SERVING.items()
        for text in texts(file)
        if module != "serving.protocol" and WIRE.search(text)
    }
    assert found == {LMCACHES}


def test_the_configuration_knows_nothing_of_serving():
    for module, file in (CONFIGURATION | modules("handlers")).items():
        assert not [it for it in imported(file) if it.split(".")[0] == "serving"], module
        assert not [it for it in texts(file) if it.startswith("serving.") and it != OPTIONS], module


OPTIONS = "serving.properties"


def test_no_circle_hides_behind_types():
    for module, file in ROOMS.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                hidden = [it.module or "" for it in node.body if isinstance(it, ast.ImportFrom)]
                assert not [it for it in hidden if it.startswith(("serving", "lmi_config"))], module


def test_the_shutdown_fits_what_platforms_grant():
    assert sum(SHUTDOWN) < GRACE_S


ONE_THING = {
    "adapter": "what the files of an adapter say, and the adapter in the server",
    "compile_cache": "its plan, and its folder",
    "connections": "connections, and the patch that they need",
    "redaction": "of options, and of log lines",
    "registry": "the patches of a process, for each process",
    "shared_store": "its options, and the store",
    "vllm": "its command line, and the engine",
}
"""Names that two or more files may share, because they concern the same thing: name → the thing."""


def test_no_two_files_have_one_name_for_different_things():
    homes: dict[str, list[str]] = {}
    for module in EVERY:
        homes.setdefault(module.rpartition(".")[2], []).append(module)
    twice = {name: it for name, it in homes.items() if len(it) > 1}
    assert {name: it for name, it in twice.items() if name not in ONE_THING} == {}
    assert twice.keys() == ONE_THING.keys()


def test_chunks_are_framed_in_one_place():
    found = {module for module, file in SERVING.items() for it in texts(file) if "%x\r\n" in it}
    assert found == {"serving.http.http1"}


def test_the_table_of_changes_names_existing_places():
    table = ARCHITECTURE.partition("\n## To change\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!to change)(.+?) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) >= MOST
    for _, places in rows:
        for path, names in re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", places):
            tree = ast.parse((ROOT / path).read_text())
            defined = {name for node in ast.walk(tree) for name in _defines(node)}
            for name in re.findall(r"`(\w+)`", names):
                assert name in defined, f"{path} has no {name}"


def _defines(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [it.id for it in targets if isinstance(it, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def test_flows_name_what_is_there():
    flows = ARCHITECTURE.partition("\n## Five flows\n")[2].partition("\n## ")[0]
    methods: dict[str, set[str]] = {}
    for file in SERVING.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                names = {name for part in node.body for name in _defines(part)}
                methods.setdefault(node.name, set()).update(names)
    named = re.findall(r"`([A-Z]\w+)(?:\.(\w+))?`", flows)
    assert len(named) > 2 * MOST
    elsewhere = {"Settings", "Machine", "ModelFacts", "Plan"}  # lmi_config's
    for name, method in named:
        if name.isupper() or name in elsewhere:
            continue
        assert name in methods, name
        assert not method or method in methods[name], f"{name}.{method}"


SPAWNS = {"create_task", "ensure_future", "Thread", "start_new_thread", "gather"}
ENDS = {
    ("serving.server.server", "_failure"): "its end is the engine's, and ends the server",
    ("serving.server.server", "follow"): "keys and certificates keep their own followers",
    ("serving.router.router", "follow"): "the same",
    ("serving.server.server", "serve"): "uvicorn's: without it there is no server",
    ("serving.user_code", "_pass_on_output"): "it ends with its process",
    ("serving.user_code", "_read_answers"): "it ends with its process, which is started again",
    ("serving.batch.run", "_watch"): "it ends with its batch, which is tried again",
    ("serving.copies.life", "_keep_router"): "its failure ends the container",
    ("serving.models.model_supervisor", "_ready"): "it ends with its model's server",
    ("serving.router.kv.events", "_follow"): "one rank of a replica, which is kept as a whole",
}
"""Functions that look again and again without being followers: (the module that starts it, its
name) → why.
"""


def looks_again(function: ast.AST) -> bool:
    """Whether a function has a loop that never ends, or one that waits before it continues, or
    reads an endless source.
    """
    endless = {"changes", "discovered", "addresses", "endpoints"}
    for node in ast.walk(function):
        if isinstance(node, ast.While):
            called = {_called(it) for it in ast.walk(node) if isinstance(it, ast.Call)}
            ends = any(isinstance(it, ast.Return | ast.Break) for it in ast.walk(node))
            forever = isinstance(node.test, ast.Constant) and not ends
            waits = called & {"sleep", "wait_for", "wait", "poll"}
            if forever or (waits and not _counts(node)):
                return True
        if isinstance(node, ast.AsyncFor) and any(
            _called(it) in endless for it in ast.walk(function) if isinstance(it, ast.Call)
        ):
            return True
    return False


def _counts(loop: ast.While) -> bool:
    """Whether a loop's condition compares values, for example with a deadline."""
    return isinstance(loop.test, ast.Compare)


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


def spawned(call: ast.Call) -> Iterator[tuple[str, bool]]:
    """The functions that a call runs concurrently, as coroutines or as a target, and whether they
    are of the same module.
    """
    works = [*call.args, *(it.value for it in call.keywords)]
    for work in works:
        if isinstance(work, ast.Call):
            yield _called(work), _is_local(work.func)
        elif _called(call) in ("Thread", "start_new_thread"):
            match work:
                case ast.Attribute(attr=name) | ast.Name(id=name):
                    yield name, _is_local(work)


def _is_local(function: ast.expr) -> bool:
    match function:
        case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
            return True
    return False


def test_what_looks_again_and_again_is_kept():
    """Tasks and threads that follow something go through serving/follow.py, which restarts them
    when they end unexpectedly: none of them dies in silence, or ends the process.
    """
    files = SERVING | modules("handlers") | {"main": ROOT / "serving/kv_cache/lmcache/__main__.py"}
    trees = {module: ast.parse(file.read_text()) for module, file in files.items()}
    following = {
        (module, function.name)
        for module, tree in trees.items()
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and looks_again(function)
    }
    anywhere = {name for _, name in following}
    assert {"_follow_file", "_follow_files", "_renew", "_keep", "keep", "reap"} <= anywhere
    found = set()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in SPAWNS:
                works = [*spawned(node)]
            elif isinstance(node, ast.Tuple | ast.List):  # of coroutines that become tasks
                calls = [it for it in node.elts if isinstance(it, ast.Call)]
                works = [(_called(it), False) for it in calls if not isinstance(it.func, ast.Name)]
            else:
                continue
            for name, local in works:
                if (module, name) in following if local else name in anywhere:
                    found.add((module, name))
    assert found - ENDS.keys() == set()


OURS = SERVING | modules("handlers")


def test_the_one_context_variable_is_the_logs():
    found = {
        (module, ast.unparse(target))
        for module, file in OURS.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and isinstance(node.value, ast.Call)
        and _called(node.value) == "ContextVar"
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    }
    assert found == {("serving.observability.logs", "REQUEST_ID")}


OF_SPANS = {"slipway.prompt_tokens", "slipway.tier_tokens"}
"""Attributes of a span of the KV connector, which are not keys of scopes."""


def test_no_scope_has_a_key_of_ours():
    """ASGI's scopes have ASGI's keys only: layers pass values to each other as arguments."""
    found = {
        (module, text)
        for module, file in OURS.items()
        for text in texts(file)
        if re.fullmatch(r"slipway\.\w+", text) and text not in OF_SPANS
    }
    assert found == set()


def test_archives_are_read_as_the_image_can():
    """The image has Debian 12's Python, 3.11.2. tarfile has filters since 3.11.4."""
    for module, file in (SERVING | CONFIGURATION | TOOLS).items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "filter":
                raise AssertionError(f"{module} has an argument filter=")


def test_no_living_object_gets_another_class():
    """An object gets its final class when it is built, at the start."""
    found = {
        module
        for module, file in OURS.items()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for it in ast.walk(target)
        if isinstance(it, ast.Attribute) and it.attr == "__class__"
    }
    assert found == set()


def test_no_test_has_mock_objects():
    """One module of a user contains such an object, and the test searches for handlers
    beside it.
    """
    users = {
        file.name
        for file in (ROOT / "tests").rglob("*.py")
        if re.search(r"^ *(import|from) (unittest\W.*\bmock|pytest_mock)", file.read_text(), re.M)
    }
    assert users == {"test_djl_python.py"}
