"""Which link of a profile KV goes by, as far as a cluster's file says: by its devices, its launcher and UCX's settings.

For workers on CUDA. A file cannot say how many GPUs a node has; its section `capacity` names what is not seen here.
"""

from loopline.capacity.hardware import Profile
from loopline.config import ClusterConfig

ONE_GPU, _NVLINK, _INFINIBAND, _TCP = "same-gpu", "nvlink", "infiniband", "tcp"
"""Links of the profiles that come along."""
_BY_CUDA_IPC = (ONE_GPU, _NVLINK)
_CUDA_IPC = {"cuda_ipc", "cuda", "all"}
_VERBS = {"ib", "all", *(f"{kind}{way}" for kind in ("rc", "dc", "ud") for way in ("", "_x", "_v", "_mlx5", "_verbs"))}
"""Names of UCX_TLS that bring a transport, with the aliases that hold it."""


def is_between_gpus(link: str) -> bool:
    """Whether it leads from one GPU to another."""
    return link in (_NVLINK, _INFINIBAND)


def is_one_device(config: ClusterConfig) -> bool:
    """Whether both roles share a GPU, where the workers' machine does not hide that from them."""
    return config.prefill.device == config.decode.device != "cpu" and config.launcher.kind == "local"


def left_out(config: ClusterConfig, link: str) -> str | None:
    """Why pushes of workers on CUDA cannot take a link of that name, or None: nothing in the file speaks against it."""
    if config.prefill.device == "cpu" or config.decode.device == "cpu":
        return None
    tls = config.transfer.ucx.get("UCX_TLS")
    if link in _BY_CUDA_IPC:
        if config.transfer.error_mode == "peer":
            return "with transfer.error_mode: peer UCX leaves CUDA IPC out"
        if tls is not None and not _allows(tls, _CUDA_IPC):
            return f"UCX_TLS is {tls}, without cuda_ipc"
    if link == _INFINIBAND and tls is not None and not _allows(tls, _VERBS):
        return f"UCX_TLS is {tls}, without rc"
    if link == _TCP and tls is not None and not _allows(tls, {"tcp", "all"}):
        return f"UCX_TLS is {tls}, without tcp"
    return None


def likely_link(config: ClusterConfig, profile: Profile) -> tuple[str, str]:
    """The link that is taken where nobody names one, and why: the profile's default, where the file allows it."""
    name = profile.default_link
    if is_one_device(config) and ONE_GPU in profile.links and left_out(config, ONE_GPU) is None:
        return ONE_GPU, f"both roles are on {config.decode.device}"
    reason = left_out(config, name)
    if reason is None:
        return name, f"the default of profile {profile.name}"
    far = (_INFINIBAND, _TCP) if config.launcher.kind == "ray" or "UCX_TLS" in config.transfer.ucx else (_TCP,)
    others = [one for one in far if one in profile.links and left_out(config, one) is None]
    return (others[0], reason) if others else (name, f"the default of profile {profile.name}")


def _allows(tls: str, names: set[str]) -> bool:
    """Whether a value of UCX_TLS leaves one of these transports in; `^` before it names those that are left out."""
    parts = {part.strip().lstrip("\\") for part in tls.removeprefix("^").split(",")}
    return not parts & (names - {"all"}) if tls.startswith("^") else bool(parts & names)
