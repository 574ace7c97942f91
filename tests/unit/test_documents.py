"""The documents name tests, modules and targets that exist. The manifests of examples/kubernetes
fit their schemas, each other, and delayq.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import typer
import yaml
from jsonschema import Draft202012Validator

import delayq
from delayq import Worker
from delayq.cli.app import app
from delayq.worker import HealthServer
from delayq.worker._scale import window_of

ROOT = Path(__file__).parents[2]
PACKAGE = Path(delayq.__file__).parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
APPLICATION = typer.main.get_command(app)


def missing_tests(text: str, files: dict[str, str]) -> list[str]:
    """Return the tests that a text names, as ``file.py::name`` or by file, and that are gone."""
    missing: list[str] = []
    for file, names in re.findall(r"(?<![\w{])(test_\w+\.py)((?:::\w+)*)", text):
        if (known := files.get(file)) is None:
            missing.append(file)
            continue
        parts = names.split("::")[1:]
        missing += [name for name in parts if not re.search(rf"(def|class) {name}\b", known)]
    return missing


def test_every_test_that_a_page_names_exists() -> None:
    files: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        files[path.name] = files.get(path.name, "") + path.read_text("utf-8")
    for page in PAGES:
        assert missing_tests(page.read_text("utf-8"), files) == [], page.name


def test_every_module_that_a_page_names_exists() -> None:
    # The module map names modules by their place in a package, and is checked below.
    for page in (page for page in PAGES if page.name != "module-map.md"):
        named = re.findall(
            r"`(?:delayq/)?((?:_\w+|admin|codecs|worker|cli|integrations|testing)/[\w/]+\.py)`",
            page.read_text("utf-8"),
        )
        assert [path for path in named if not (PACKAGE / path).exists()] == [], page.name


def test_the_module_map_is_made_from_the_docstrings_of_today() -> None:
    page = (ROOT / "docs" / "module-map.md").read_text("utf-8")
    assert page == runpy.run_path(str(ROOT / "docs" / "modules.py"))["page"](), (
        "run: python docs/modules.py"
    )


def test_the_code_in_the_guide_for_contributors_is_in_the_package() -> None:
    sources = [
        dedent_all(path.read_text("utf-8"))
        for path in PACKAGE.rglob("*")
        if path.suffix in {".py", ".lua"}
    ]
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    blocks = re.findall(r"^( *)```(?:python|lua)\n(.*?)^\1```", guide, re.DOTALL | re.MULTILINE)
    excerpts = [part for _, block in blocks for part in re.split(r"\n\s*\n\s*\n", block)]
    assert len(excerpts) > 4
    for excerpt in excerpts:
        text = dedent_all(excerpt).strip()
        assert any(text in source for source in sources), f"not in the package:\n{excerpt}"


def dedent_all(text: str) -> str:
    """Return a text without blank lines, and without the white space before and after lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_guide_for_contributors_names_all_files_that_treat_states_of_messages() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    recipe = guide.partition("### ... a state")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(?:delayq/)?([\w/]+\.(?:py|html))`", recipe))
    # Those of Redisson's queue are others.
    found = {
        path.name if path.suffix == ".html" else path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.*")
        if path.suffix in {".py", ".html"}
        and not {"_redisson", "delayed.py"}.intersection(path.parts)
        and re.search(r"""["']leased["']|(?<!keys)\.leased\b""", path.read_text("utf-8"))
    }
    assert found <= named


def test_every_target_of_make_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"`make ((?:[a-z-]+ ?)+)", page.read_text("utf-8"))
        assert {*" ".join(named).split()} <= targets, page.name


def wrong_commands(text: str) -> list[str]:
    """Return the ``delayq`` commands in a text that there are not, or not with these options."""
    wrong = []
    spans = re.findall(r"`(delayq +[^`]+)`|^(?:\$ |[A-Z_]+=\S+ )+(delayq .*)$", text, re.MULTILINE)
    for line in (inline or shown for inline, shown in spans):
        command: Any = APPLICATION
        words = line.partition(" | ")[0].split()[1:]
        while words and hasattr(command, "commands"):
            if words[0].startswith("-"):
                break
            command = command.commands.get(words.pop(0))
        known = {"--help", "--install-completion"}
        for each in getattr(command, "params", ()):
            known |= {*each.opts, *each.secondary_opts}
        given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if command is None or given - known:
            wrong.append(line)
    return wrong


def test_every_command_that_a_page_shows_exists() -> None:
    for page in PAGES:
        if page.name != "CHANGELOG.md":
            assert wrong_commands(page.read_text("utf-8")) == [], page.name
    wrong = ("delayq dead list --queue mails", "delayq lost", "delayq top --watch")
    right = "`delayq dead list mails --limit 5`\n$ delayq queues --json | head -n 1"
    assert wrong_commands("`{}`, `{}`\n$ {}\n".format(*wrong) + right) == [*wrong]


MANIFESTS: dict[str, Any] = {
    manifest["kind"]: manifest
    for path in sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
    for manifest in yaml.safe_load_all(path.read_text("utf-8"))
}
KEDA = yaml.safe_load((ROOT / "tests" / "data" / "keda_scaledobject.yaml").read_text("utf-8"))
FIGURES = {"due", "due_within", "running", "waiting", "late_seconds"}


def validate(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_every_manifest_fits_its_schema() -> None:
    assert {*MANIFESTS} == {"Deployment", "Service", "PodDisruptionBudget", "ScaledObject"}
    for kind, manifest in MANIFESTS.items():
        if kind != "ScaledObject":
            validate(manifest)
    scaled = MANIFESTS["ScaledObject"]
    Draft202012Validator(KEDA).validate(scaled)
    # KEDA makes one of these of it.
    behavior = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", **scaled["spec"]["scaleTargetRef"]}
    spec = {"scaleTargetRef": target, "maxReplicas": scaled["spec"]["maxReplicaCount"], **behavior}
    name = {"name": "a"}
    kind = "HorizontalPodAutoscaler"
    validate({"apiVersion": "autoscaling/v2", "kind": kind, "metadata": name, "spec": spec})


def test_the_worker_has_time_to_stop_and_its_probes_ask_where_it_answers() -> None:
    pod = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    # And some seconds in which cancelled handlers end and messages go back.
    assert pod["terminationGracePeriodSeconds"] >= Worker().shutdown_timeout + 10
    command = container["command"]
    assert command[:2] == ["delayq", "worker"]
    server = HealthServer(command[command.index("--health") + 1])
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [
        ("health", server.port)
    ]
    paths = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "health"}


def test_the_autoscaler_asks_the_workers_that_it_scales() -> None:
    deployment, service = MANIFESTS["Deployment"], MANIFESTS["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert MANIFESTS[kind]["spec"]["selector"]["matchLabels"] == labels
    scaled = MANIFESTS["ScaledObject"]["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    (port,) = service["spec"]["ports"]
    triggers = {trigger["name"]: trigger["metadata"] for trigger in scaled["triggers"]}
    for trigger in triggers.values():
        url = urlsplit(trigger["url"])
        assert url.netloc.split(".")[0] == service["metadata"]["name"]
        assert (url.port, url.path) == (port["port"], "/scale/mails")
        assert window_of(url.query) == 60
        assert trigger["valueLocation"] in FIGURES
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert {*re.findall(r"\w+", formula)} == {*triggers}
