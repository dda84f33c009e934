"""Odd plugins: whatever one of them does, the others work, and it is named."""

from __future__ import annotations

import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packages import install, made
from typer.testing import CliRunner

import kvpolicy
from kvpolicy.cli import app
from kvpolicy.errors import PluginError, PolicyFileError
from kvpolicy.registry import Registry, loaded, registry

OFFER = "import pathlib\n@hookimpl\ndef kvpolicy_policies():\n    return pathlib.Path(__file__).parent / 'policies'"


def invoked(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False, env={"COLUMNS": "300"})


def metadata(site: Path, text: str) -> None:
    (site / "acme-1.5.dist-info" / "METADATA").write_text(text)


def entry(site: Path, text: str) -> None:
    (site / "acme-1.5.dist-info" / "entry_points.txt").write_text(f"[kvpolicy]\n{text}\n")


@pytest.mark.parametrize("asks", ["kvpolicy.load('snapkv')", "kvpolicy.register(Middle)"])
@pytest.mark.parametrize("when", ["first", "last"])
def test_a_plugin_that_asks_for_policies_while_it_is_loaded_is_left_out(site: Path, asks: str, when: str) -> None:
    code = f"import kvpolicy; asked = globals().get('asked', 0) + 1; {asks}"
    install(site, "acme", **{when: f"global asked; {code}" if when == "first" else code})
    install(site, "bravo", name="other")
    assert registry().get("score", "other").origin == "bravo 1.5"
    assert "middle" not in registry().names("score")
    (failure,) = registry().failures
    assert str(failure).startswith("PluginError: acme 1.5 asks for policies or plugins, or registers them, while it is")
    assert when == "last" or sys.modules["acme"].asked == 1
    found = invoked("doctor")
    assert "problem: acme 1.5 could not be loaded: PluginError: acme 1.5 asks for policies" in found.stdout


def test_threads_get_one_registry(site: Path) -> None:
    install(site, "acme", last="import time; time.sleep(0.3)")
    registries: list[Registry] = []
    threads = [threading.Thread(target=lambda: registries.append(registry())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registries) == 4
    assert all(each is registry() for each in registries)


def test_threads_lose_nothing_that_they_register() -> None:
    classes = [made(f"mine-{index}") for index in range(64)]
    registrations: list[kvpolicy.registering.Registration] = []
    start = threading.Barrier(4)

    def work(part: int) -> None:
        start.wait()
        registrations.extend(kvpolicy.register(cls) for cls in classes[part::4])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {cls.name for cls in classes} <= set(registry().names("score"))  # type: ignore[attr-defined]
    finally:
        sys.setswitchinterval(interval)
        for registration in registrations:
            registration.undo()


ODD = {
    "entry point": (
        lambda site: entry(site, "x = not a module!"),
        "acme 1.5",
        "PluginError: expected an entry point such as x = package.module, got x = not a module!",
    ),
    "no version": (
        lambda site: metadata(site, "Metadata-Version: 2.1\nName: acme\n"),
        "acme",
        "PluginError: expected a Name and a Version in the METADATA of its distribution, got acme and None",
    ),
    "no metadata": (
        lambda site: metadata(site, ""),
        "module acme",
        "PluginError: expected a Name and a Version in the METADATA of its distribution, got None and None",
    ),
    "getattr": (
        lambda site: (site / "acme.py").write_text("def __getattr__(name):\n    raise RuntimeError('no')\n"),
        "acme 1.5",
        "RuntimeError: no ({site}/acme.py:2)",
    ),
    "str": (
        lambda site: (site / "acme.py").write_text(
            "class Mute(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Mute\n"
        ),
        "acme 1.5",
        "Mute: (its text cannot be shown: ZeroDivisionError) ({site}/acme.py:4)",
    ),
}


@pytest.mark.parametrize("how", ODD)
def test_an_odd_package_is_left_out_and_said(site: Path, how: str) -> None:
    spoil, origin, says = ODD[how]
    install(site, "acme")
    install(site, "bravo", name="other")
    spoil(site)
    says = says.replace("{site}", str(site))
    assert registry().get("score", "other").origin == "bravo 1.5"
    (failure,) = registry().failures
    assert (failure.origin, str(failure)) == (origin, says)
    assert f"problem: {origin} could not be loaded: {says}" in invoked("doctor").stdout.splitlines()
    assert says in invoked("list", "scorers").stdout


def test_an_object_registered_in_code_may_be_odd_too() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Lazy:
        @property
        def kvpolicy_contract(self) -> int:
            raise Mute

        @kvpolicy.hookimpl
        def kvpolicy_scorers(self) -> list[type]:
            return []

    with pytest.raises(PluginError, match=r"its hooks raised Mute: \(its text cannot be shown: RuntimeError\)"):
        kvpolicy.register(Lazy())


def policies(site: Path, **texts: str) -> Path:
    """Install a package of policies, each with its text, and return their folder."""
    install(site, "acme", last=OFFER)
    (site / "policies").mkdir()
    for name, text in texts.items():
        (site / "policies" / f"{name}.yaml").write_text(text)
    loaded.cache_clear()
    return site / "policies"


def test_a_broken_policy_ends_no_list(site: Path) -> None:
    policies(site, bad="score: [", good="description: Mine.\nextends: snapkv\n")
    shown = invoked("list")
    assert shown.exit_code == 0
    assert "Mine." in shown.stdout
    assert "policy 'bad'" in shown.stdout.partition("could not be loaded")[2]
    listed = invoked("list", "policies", "--json")
    assert '"name": "good"' in listed.stdout
    assert '"name": "bad"' not in listed.stdout
    assert listed.stderr.startswith("warning: acme 1.5: policy 'bad' could not be loaded: ")


def test_a_plugin_that_raises_while_a_policy_is_made_is_said_by_doctor(site: Path) -> None:
    install(site, "acme", last=f"def fail(self):\n    raise RuntimeError('odd')\n{OFFER}", name="middle")
    code = (site / "acme.py").read_text()
    (site / "acme.py").write_text(code.replace("    power: float = 1.0\n", "    __post_init__ = lambda self: 1 / 0\n"))
    (site / "policies").mkdir()
    (site / "policies" / "bad.yaml").write_text("extends: snapkv\nscore: middle\n")
    found = invoked("doctor")
    assert "problem: acme 1.5: policy 'bad': ZeroDivisionError: division by zero" in found.stdout.splitlines()


def test_the_way_to_a_path_is_said_of_an_unknown_name_alone(site: Path) -> None:
    policies(site, bad="score: [")
    with pytest.raises(PolicyFileError) as caught:
        kvpolicy.load("bad")
    assert "The path of a file" not in str(caught.value)
    with pytest.raises(PolicyFileError, match=r"unknown policy 'bat'.+\. The path of a file has a '/' or ends in"):
        kvpolicy.load("bat")


@pytest.mark.parametrize(
    "file", [".yaml", "-x.yaml", ".hidden.yaml", "1e3.yaml", "my policy.yaml", "x.yml", "UP.YAML", "a.yaml.yaml"]
)
def test_a_policy_file_whose_name_will_not_do_is_refused(site: Path, file: str) -> None:
    (policies(site, good="extends: snapkv\n") / file).write_text("extends: snapkv\n")
    with pytest.raises(PluginError) as caught:
        registry()
    assert "acme 1.5: expected policy files such as my-policy.yaml (a letter, then letters, " in str(caught.value)
    assert f"got {file!r}" in str(caught.value)


def test_policies_inside_an_archive_are_refused(site: Path) -> None:
    install(
        site,
        "acme",
        last="import zipfile\n@hookimpl\ndef kvpolicy_policies():\n    return zipfile.Path(ARCHIVE, 'of/')",
    )
    archive = site / "acme.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("of/mine.yaml", "extends: snapkv\n")
    code = (site / "acme.py").read_text()
    (site / "acme.py").write_text(f"ARCHIVE = {str(archive)!r}\n{code}")
    with pytest.raises(
        PluginError, match=r"acme 1\.5: expected a folder on disk from .+acme\.zip.+ install the package"
    ):
        registry()


def test_a_clash_with_a_built_in_does_not_tell_to_uninstall_kvpolicy(site: Path) -> None:
    install(site, "acme", name="random")
    with pytest.raises(PluginError) as caught:
        registry()
    assert str(caught.value).endswith(
        "Leave acme 1.5 out (KVPOLICY_PLUGINS names those to load), or ask its author to rename it."
    )


def test_a_policy_is_no_plugin() -> None:
    for policy in (kvpolicy.Policy, kvpolicy.load("snapkv")):
        with pytest.raises(PluginError, match="expected plugin classes, got a policy: a hook offers those, as files"):
            kvpolicy.register(policy)


def test_a_new_plugin_can_be_written_beside_a_wrong_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "acme", hook="kvpolicy_scorer")
    monkeypatch.chdir(tmp_path)
    written = invoked("plugin", "new", "my-own")
    assert written.exit_code == 0
    assert written.stderr.startswith("warning: 'my-own' is compared with kvpolicy's own names alone: acme 1.5: unknown")
    assert (tmp_path / "kvpolicy-my-own" / "pyproject.toml").is_file()
    taken = invoked("plugin", "new", "random")
    assert taken.exit_code == 2
    assert "expected a new name, got 'random', which kvpolicy" in taken.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("example", "expected another name: kvpolicy-example is a package of kvpolicy's own"),
        ("kvpress", "expected another name: kvpolicy-kvpress is a package of kvpolicy's own"),
        ("test", "pytest would take the class Test or the module kvpolicy_test for tests"),
        ("testy", "pytest would take the class Testy or the module kvpolicy_testy for tests"),
        ("my-test", "pytest would take the class MyTest or the module kvpolicy_my_test for tests"),
    ],
)
def test_a_name_that_would_be_taken_for_another_thing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = invoked("plugin", "new", name)
    assert refused.exit_code == 2
    assert says in refused.stderr
    assert not any(tmp_path.iterdir())
