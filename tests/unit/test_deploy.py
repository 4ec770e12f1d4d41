"""What is there for other nodes: the pins for aarch64, the container, the manifest and the script."""

import copy
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.schema import faults

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def _pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {_key(package): version for package, version in (line.split("==") for line in lines)}


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _manifest() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "raycluster.yaml").read_text(encoding="utf-8"))
    return content


def _faults(manifest: dict[str, Any]) -> list[str]:
    content = yaml.safe_load((ROOT / "tests/data/raycluster-v1.yaml").read_text(encoding="utf-8"))
    return list(faults(manifest, content["schema"], content["definitions"]))


def test_every_dependency_is_pinned_for_aarch64_as_it_is_elsewhere() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["otel"], "ray"]
    names = {_key(re.split(r"[<>=!~\[ ;]", one)[0]) for one in wanted}
    pins, here = _pins("constraints-aarch64.txt"), _pins("constraints.txt")
    assert names <= set(pins)
    differ = {name for name in set(pins) & set(here) if pins[name] != here[name]}
    assert differ <= {"triton"}  # which belongs to a torch with CUDA; the CPU build of the same torch asks for none


def test_the_manifest_follows_the_schema_of_ray_clusters() -> None:
    manifest = _manifest()
    assert _faults(manifest) == []
    assert manifest["spec"]["rayVersion"] == _pins("constraints-aarch64.txt")["ray"]


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("spec", "headGroupSpec", "templte"), {}, "no key 'templte' is known here"),
        (("spec", "workerGroupSpecs", 0, "minReplicas"), "3", "'3' is not of type integer"),
        (("spec", "headGroupSpec", "rayStartParams", "num-gpus"), 0, "0 is not of type string"),
        (("spec", "headGroupSpec", "serviceType"), "Cluster", "'Cluster' is not one of"),
        (("apiVersion",), "ray.io/v1alpha1", "is not one of"),
        (
            ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits", "memory"),
            "256 GB",
            "is none of what is allowed",
        ),
    ],
)
def test_a_manifest_that_is_wrong_is_found_out(path: tuple[Any, ...], value: Any, words: str) -> None:
    manifest = copy.deepcopy(_manifest())
    inner: Any = manifest
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    assert len(_faults(manifest)) == 1 and words in _faults(manifest)[0]


def test_a_manifest_without_a_needed_key_is_found_out() -> None:
    manifest = _manifest()
    del manifest["spec"]["workerGroupSpecs"][0]["template"]
    assert _faults(manifest) == [".spec.workerGroupSpecs[0]: template is missing"]


def test_the_image_s_user_needs_no_right_of_root_s() -> None:
    """It is none: a folder that the kubelet makes on a node is root's, and a capability is not in effect for others."""
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    assert re.search(r"^USER (\S+)$", text, re.MULTILINE) and "USER root" not in text
    written = set(re.findall(r"(?:LOOPLINE_CACHE|TRITON_CACHE_DIR)=(\S+)", text))
    spec = _manifest()["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert not any("hostPath" in volume for volume in volumes.values())
        for container in pod["containers"]:
            assert "capabilities" not in container.get("securityContext", {})
            places = {mount["mountPath"]: mount for mount in container["volumeMounts"] if not mount.get("readOnly")}
            for path in written:
                (mount,) = [places[place] for place in places if f"{path}/".startswith(f"{place}/")]
                assert "emptyDir" in volumes[mount["name"]]


def test_the_script_is_one_that_bash_reads() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-n", str(DEPLOY / "loopline.sbatch")], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_copies_what_is_there_and_all_packages() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE) for word in line.split()]
    assert [word for word in copied if not (ROOT / word).exists()] == []
    with (ROOT / "pyproject.toml").open("rb") as file:
        packages = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {package.removesuffix("*") for package in packages} <= set(copied)
    assert "constraints-aarch64.txt" in copied
