"""The environment variables: parsing, defaults, errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from npu_compiler.support import env
from npu_compiler.support.errors import ConfigError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in env.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_defaults_and_coverage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    settings = env.settings()
    assert set(settings) == set(env.VARIABLES)
    assert settings["NPU_CACHE_SIZE"] == 2 * 1024**3
    assert (
        settings["NPU_COMPILE_JOBS"]
        == env.usable_cpus()
        >= settings["NPU_NUM_THREADS"]
        == min(env.usable_cores(), env.MAX_THREADS)
        >= 1
    )
    assert (settings["NPU_DEBUG"], settings["NPU_VERIFY"], settings["NPU_TARGET"]) == (0, 0, "cpu")
    assert settings["NPU_DISABLE"] == frozenset()
    assert settings["NPU_CXX"] is None and settings["NPU_DUMP"] is None


@pytest.mark.parametrize(
    ("quota", "cpus", "cores"),
    [("max 100000", {0, 1, 2, 3}, 2), ("max 100000", {0, 1, 3}, 2), ("max 100000", {0, 2}, 1), (None, {0, 1, 8}, 3),
     ("150000 100000", {0, 1, 8}, 2), ("1000 100000", {0, 1}, 1)],
)  # fmt: skip
def test_a_core_counts_once_up_to_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quota: str | None, cpus: set[int], cores: int
) -> None:
    for cpu in range(4):  # CPUs 0 and 2 share a core, as do 1 and 3; the system tells nothing about CPU 8
        folder = tmp_path / "devices" / "system" / "cpu" / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 2},{cpu % 2 + 2}\n")
    if quota is not None:
        (tmp_path / "fs" / "cgroup").mkdir(parents=True)
        (tmp_path / "fs" / "cgroup" / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(env, "_SYS", tmp_path)
    monkeypatch.setattr(env.os, "sched_getaffinity", lambda _: cpus, raising=False)
    assert env.usable_cores() == cores
    monkeypatch.delattr(env.os, "sched_getaffinity")
    assert env.usable_cores() == env.usable_cpus()


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("123", 123), ("1k", 1024), ("1.5M", 3 * 2**19), ("2GiB", 2**31), ("2 gb", 2**31), ("1T", 2**40)],
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("NPU_CACHE_SIZE", text)
    assert env.cache_size() == size


def test_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_DISABLE", "conv_bn, cse,,dce ")
    monkeypatch.setenv("NPU_VERIFY", "Yes")
    monkeypatch.setenv("NPU_TARGET", "CUDA")
    monkeypatch.setenv("NPU_DUMP", "~/dump")
    monkeypatch.setenv("NPU_NUM_THREADS", " 3 ")
    monkeypatch.setenv("NPU_DEBUG", "")
    assert env.disabled() == {"conv_bn", "cse", "dce"}
    assert env.verify() == 1
    assert env.target() == "cuda"
    assert env.dump_dir() == Path.home() / "dump"
    assert env.num_threads() == 3
    assert env.debug() == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("NPU_CACHE_SIZE", "big"),
        ("NPU_CACHE_SIZE", "-1"),
        ("NPU_CACHE_SIZE", "9" * 400),
        ("NPU_NUM_THREADS", "0"),
        ("NPU_COMPILE_JOBS", "-1"),
        ("NPU_NUM_THREADS", "two"),
        ("NPU_DEBUG", "-1"),
        ("NPU_VERIFY", "maybe"),
    ],
)
def test_bad_value_names_the_variable_and_what_it_takes(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError) as caught:
        env.settings()
    assert str(caught.value).startswith(f"{name}=")
    assert env.VARIABLES[name].accepts in str(caught.value)


def test_misspelt_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_NUM_TREADS", "2")
    assert "NPU_NUM_TREADS" in env.unknown()


def test_the_documentation_lists_every_variable() -> None:
    page = Path(__file__).parents[3] / "docs" / "environment.md"
    assert page.read_text(encoding="utf-8") == env.markdown(), "npusim doctor --markdown > docs/environment.md"
    for v in env.VARIABLES.values():
        assert f"| `{v.name}` | {v.meaning} | {v.accepts} | {v.default} |" in env.markdown()
