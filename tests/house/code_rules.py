"""What the house's code must keep to, read off its sources: sizes, arrows, names."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pshard.units import kinds
from pshard.units.unit import UnitKind

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    *("pshard", "models", "profile", "planner", "registries", "runtime", "reports"),
    *("hub", "session", "server", "commands"),
)
# which folders a folder may import, itself aside; commands and session put all of them together, hub what it takes to
# plan from a header
ARROWS = {
    "pshard": set(),
    "models": {"pshard"},
    "registries": {"pshard"},
    "planner": {"pshard"},
    "reports": {"pshard"},
    "runtime": {"pshard"},
    "profile": {"pshard", "runtime"},
    "hub": {"pshard", "models", "planner"},
    "session": {"pshard", "models", "registries", "planner", "runtime", "profile", "reports", "hub"},
    "server": {"pshard", "models", "registries", "planner", "runtime", "session"},
    "commands": {
        *("pshard", "models", "registries", "planner", "runtime", "profile", "reports", "session", "hub", "server")
    },
}
# files and folders of pshard/, from the bottom up: each may import those before it
NOUNS = (
    *(
        "errors",
        "paths",
        "print_table",
        "file_lock",
        "jsonio",
        "batch",
        "batch_sizes",
        "reserve",
        "speculation",
        "quant",
        "tensor",
        "model_config",
        "homes",
    ),
    *("times", "machine", "collectives", "units", "model", "workload", "cuts", "plan", "predicted_times"),
    *("on_host", "on_disk", "packed_file", "routing", "buffers", "steps"),
)
KINDS = {kind.name for kind in kinds.KINDS}
DECLARED = {name for name, value in vars(kinds).items() if isinstance(value, UnitKind)}
VARIATIONS = {"window", "delta", "latent", "experts", "gated"}  # of models, as ModelConfig says them


@cache  # read once for all rules
def list_sources() -> tuple[Path, ...]:
    """Every Python file of the package."""
    return tuple(sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")))


@cache
def list_modules() -> frozenset[str]:
    """How every source is imported."""
    return frozenset(map(module_name, list_sources()))


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a file's syntax, one after the other."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def module_name(path: Path) -> str:
    """How a source is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts if parts[0] == "pshard" else ("pshard", *parts))
    return name.removesuffix(".__init__")


def folder_of(module: str) -> str:
    """The folder of ARROWS that a module belongs to."""
    parts = module.split(".")
    if len(parts) > 1 and parts[1] in ARROWS and parts[1] != "pshard":
        return parts[1]
    return "pshard"


def find_wrong_links() -> list[str]:
    """What to run for links in .links/pshard/ that lack or lead elsewhere: editors find the package by them."""
    package = ROOT / ".links" / "pshard"
    nouns = [path for path in (ROOT / "pshard").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    wanted = {path.name: path for path in (*nouns, *(ROOT / folder for folder in FOLDERS if folder != "pshard"))}
    links = {path.name: path.resolve() for path in package.iterdir() if path.is_symlink()}
    lacking = [path.relative_to(ROOT) for name, path in wanted.items() if links.get(name) != path]
    makes = [f"ln -sfn ../../{path} .links/pshard/{path.name}" for path in lacking]
    return makes + [f"git rm .links/pshard/{name}" for name in links if name not in wanted]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Modules of the package that a file imports, also inside functions and for types only."""
    known = list_modules()
    found = set[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pshard"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("pshard")}
    return frozenset(found)


def find_missing_modules() -> list[str]:
    """Imports of modules that there are not, also late ones, which no test may meet."""
    known = list_modules() | {"pshard.runtime.kernels.cpu._native"}
    files = [*list_sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in re.findall(r"^\s*(?:from|import) (pshard\b[\w.]*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if name not in known
    ]


def find_circles() -> list[str]:
    """Import circles between files, imports for types and those inside functions included."""
    graph = {module_name(path): imports_of(path) - {"pshard"} for path in list_sources()}
    del graph["pshard"]  # hands out `load` when it is asked for
    circles, state = [], dict[str, int]()

    def visit(module: str, way: tuple[str, ...]) -> None:
        state[module] = 1
        for other in sorted(graph.get(module, ())):
            if state.get(other) == 1:
                circles.append(" -> ".join((*way[way.index(other) :], other)) if other in way else other)
            elif other not in state:
                visit(other, (*way, other))
        state[module] = 2

    for module in graph:
        if module not in state:
            visit(module, (module,))
    return circles


def find_mutual_folders() -> list[str]:
    """Pairs of folders that import each other, neither of which lies in the other: files of both are read together.
    `pshard.load` stands at the top of the package and is left out."""
    homes = {module_name(path): path.parent.relative_to(ROOT) for path in list_sources() if path.parent != ROOT}
    arrows = set()
    for path in list_sources():
        here = path.parent.relative_to(ROOT)
        arrows |= {(here, homes[other]) for other in imports_of(path) - {"pshard"} if module_name(path) != "pshard"}
    return sorted(
        f"{a} and {b}"
        for a, b in arrows
        if (b, a) in arrows and str(a) < str(b) and a not in b.parents and b not in a.parents
    )


def find_upward_arrows() -> list[str]:
    """Imports that ARROWS does not allow."""
    found = []
    for path in list_sources():
        module = module_name(path)
        folder = folder_of(module)
        if module == "pshard":
            continue  # hands out `load` when it is asked for
        for other in sorted(imports_of(path)):
            there = folder_of(other)
            if there != folder and there not in ARROWS[folder]:
                found.append(f"{module} -> {other}")
    return found


def find_arrows_among_nouns() -> list[str]:
    """Imports inside pshard/ that NOUNS does not allow."""
    found = []
    for path in list_sources():
        module = module_name(path)
        if folder_of(module) != "pshard" or module == "pshard":
            continue
        for other in sorted(imports_of(path) - {"pshard"}):
            if folder_of(other) == "pshard" and NOUNS.index(other.split(".")[1]) > NOUNS.index(module.split(".")[1]):
                found.append(f"{module} -> {other}")
    return found


def find_long_code(most_function: int = 70, most_class: int = 250) -> list[str]:
    """Functions and classes that are longer than one sitting; Triton kernels aside."""
    found = []
    for path in list_sources():
        if path.name.startswith("triton_"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                most = most_class if isinstance(node, ast.ClassDef) else most_function
                if lines > most:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    return found


def find_choices_in_kernels() -> list[str]:
    """`triton.jit` functions that return a comparison of constants: Triton 3.6 makes a tensor of it, which no branch of
    the compiler can follow. `triton.constexpr_function` gives a constant."""
    found = []
    for path in list_sources():
        for node in nodes_of(path) if path.name.startswith("triton_") else ():
            if not isinstance(node, ast.FunctionDef) or "triton.jit" not in map(ast.unparse, node.decorator_list):
                continue
            returned = [part.value for part in ast.walk(node) if isinstance(part, ast.Return)]
            constants = {a.arg for a in node.args.args if a.annotation and ast.unparse(a.annotation) == "tl.constexpr"}
            for value in returned:
                if isinstance(value, ast.Compare | ast.BoolOp) and names_in(value) <= constants:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}")
    return found


def names_in(value: ast.AST) -> set[str]:
    """Names that an expression reads."""
    return {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}


def find_long_calls(most: int = 8) -> list[str]:
    """Calls with more positional arguments than people can tell apart; Triton kernels aside."""
    found = []
    for path in list_sources():
        if path.name.startswith("triton_"):
            continue
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and len(node.args) > most:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {len(node.args)} positional arguments")
    return found


def list_users() -> Iterator[Path]:
    """Sources that should ask a unit's kind, and neither which it is nor which variations the model has."""
    for path in list_sources():
        inside = path.relative_to(ROOT).parts
        if inside[0] != "models" and inside[:2] != ("pshard", "units"):
            yield path


def find_kind_names() -> list[str]:
    """Lines outside units/, models/ and server/ with a text that is the name of a kind of unit: also those where it
    means something else, a table of a profile or a function of the C++ library."""
    found = []
    for path in list_users():
        inside = path.relative_to(ROOT)
        if inside.parts[0] == "server":
            continue  # its clients have fields of these names
        lines = {node.lineno for node in nodes_of(path) if isinstance(node, ast.Constant) and node.value in KINDS}
        found += [f"{inside}:{line}" for line in sorted(lines)]
    return found


def find_kind_imports() -> list[str]:
    """Imports of one kind of unit outside units/ and models/."""
    found = []
    for path in list_users():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("pshard.units."):
                names = [alias.name for alias in node.names if alias.name in DECLARED]
                found += [f"{path.relative_to(ROOT)}:{node.lineno}: {name}" for name in names]
    return found


def find_variations() -> list[str]:
    """Lines outside units/ and models/ that ask a model's configuration for a variation which its units declare."""
    found = []
    for path in list_users():
        asked = (n for n in nodes_of(path) if isinstance(n, ast.Attribute) and n.attr in VARIATIONS)
        lines = {n.lineno for n in asked if "config" in (getattr(n.value, "id", ""), getattr(n.value, "attr", ""))}
        found += [f"{path.relative_to(ROOT)}:{line}" for line in sorted(lines)]
    return found


def find_site_names() -> list[str]:
    """Files with "streamed" as a text: others ask a placement, or name the site by the constant in homes.py."""
    return [str(path.relative_to(ROOT)) for path in list_sources() if '"streamed"' in path.read_text(encoding="utf-8")]


def find_compared_sites() -> list[str]:
    """Lines that compare a placement's `where` with something, instead of asking what is to be known of it."""
    found = []
    for path in list_sources():
        for node in nodes_of(path):
            sides = (node.left, *node.comparators) if isinstance(node, ast.Compare) else ()
            if any(isinstance(side, ast.Attribute) and side.attr == "where" for side in sides):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


if __name__ == "__main__":
    arrows = (find_missing_modules, find_wrong_links, find_circles, find_upward_arrows, find_arrows_among_nouns)
    sizes, homes = (find_long_code, find_long_calls), (find_site_names, find_compared_sites)
    for rule in (*arrows, find_mutual_folders, *sizes, find_kind_names, find_kind_imports, find_variations, *homes):
        lines = rule()
        print(f"{rule.__name__}: {len(lines)}")
        for line in lines:
            print(f"  {line}")
