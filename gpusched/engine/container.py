"""Command lines of container runtimes. Pure: what to run and where, to argv and environment file.

Sources: podman-run(1), podman-pull(1) 4.3; apptainer exec and pull, 1.3; CDI 0.6 for the names of devices.

podman: `--cgroups=disabled` keeps the container in the run's own control group, under its limits and its kill;
`--log-driver=passthrough` gives it the run's output itself, without a copy in podman's hands. Only allotted GPUs are
added, by CDI. apptainer runs in the run's control group anyway, and `--nv` brings all GPUs: the run's device rule shuts
the others.
"""

from __future__ import annotations

import shlex

from gpusched.model.container import PODMAN, is_image_file
from gpusched.model.units import is_variable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gpusched.model.container import Bind

LABEL = "gpusched"
"""Label of containers: the spool of their daemon."""
INFRASTRUCTURE = frozenset(
    {
        *("podman", "conmon", "catatonit", "podman-init", "crun", "runc", "fuse-overlayfs", "slirp4netns", "pasta"),
        *("apptainer", "starter", "starter-suid", "Apptainer runti", "appinit", "squashfuse_ll", "gocryptfs"),
    }
)
"""Names of the runtime's own processes, which no signal of a job is for: podman ends with success when all of them are
told to end, while the job is still saving its work."""
_OUTSIDE = frozenset(
    {
        *("HOME", "SHELL", "TMPDIR", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_", "PATH", "PYTHONHOME"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS"),
    }
)
"""Variables that say something about the host's files; the image has its own."""
_STEERING = ("CONTAINER_HOST", "CONTAINER_CONNECTION", "DOCKER_HOST", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that would send the runtime elsewhere: to another machine's engine, beyond the run's limits."""


class ContainerRun:
    """One run's container: what is started, from which image, with what of the host."""

    def __init__(
        self,
        *,
        program: str,
        name: str,
        image: str,
        argv: Sequence[str],
        work_dir: str,
        binds: Sequence[Bind],
        devices: Sequence[str] = (),
        has_gpus: bool = False,
        env_file: str = "",
        env_names: Sequence[str] = (),
        label: str = "",
        umask: int = 0o022,
        is_root: bool = False,
        has_input: bool = False,
        has_terminal: bool = False,
        has_streams: bool = False,
    ) -> None:
        """Args: program: path of the runtime. image: pinned. work_dir: inside. devices: CDI names of its GPUs.
        env_names: variables that the runtime passes on from its own environment. has_streams: of a client, pipes."""
        self.program = program
        self.name = name
        self.image = image
        self.argv = argv
        self.work_dir = work_dir
        self.binds = binds
        self.devices = devices
        self.has_gpus = has_gpus
        self.env_file = env_file
        self.env_names = env_names
        self.label = label
        self.umask = umask
        self.is_root = is_root
        self.has_input = has_input
        self.has_terminal = has_terminal
        self.has_streams = has_streams


def run_command(runtime: str, run: ContainerRun) -> list[str]:
    """The command that becomes the run's process."""
    return _podman_run(run) if runtime == PODMAN else _apptainer_exec(run)


def _podman_run(run: ContainerRun) -> list[str]:
    # With a terminal podman has to be in between.
    driver = "none" if run.has_terminal else "passthrough"
    command = [
        *(run.program, "--cgroup-manager=cgroupfs", "run", "--rm", "--init", "--pull=never"),
        *(f"--name={run.name}", f"--label={LABEL}={run.label}", "--cgroups=disabled", f"--log-driver={driver}"),
        *("--network=host", "--security-opt=label=disable", "--security-opt=no-new-privileges", "--entrypoint="),
        f"--umask={run.umask:04o}",
        # Root's own containers need no user namespace to be the same user.
        *([] if run.is_root else ["--userns=keep-id"]),
        *(f"--device={device}" for device in run.devices),
        # Workers of a data loader share memory there; podman's own one has 64 MiB.
        "--volume=/dev/shm:/dev/shm",
    ]
    command += [f"--volume={_mounted(bind)}" for bind in run.binds]
    command += [f"--workdir={run.work_dir}", f"--env-file={run.env_file}"]
    command += [f"--env={name}" for name in run.env_names]
    if run.has_terminal:
        command += ["--interactive", "--tty"]
    elif run.has_input or run.has_streams:
        command.append("--interactive")
    return [*command, run.image, *run.argv]


def _apptainer_exec(run: ContainerRun) -> list[str]:
    command = [run.program, "--quiet", "exec", "--contain", "--cleanenv", f"--env-file={run.env_file}"]
    command += ["--nv"] if run.has_gpus else []
    command.append("--bind=/dev/shm:/dev/shm")
    command += [f"--bind={_mounted(bind)}" for bind in run.binds]
    return [*command, f"--pwd={run.work_dir}", run.image, *run.argv]


def enter_command(runtime: str, run: ContainerRun) -> list[str]:
    """The command that starts another one beside the run's: in its container; with apptainer, whose containers have
    neither a name nor processes of their own, in the same image with the same mounts.
    """
    if runtime != PODMAN:
        return _apptainer_exec(run)
    command = [run.program, "--cgroup-manager=cgroupfs", "exec", "--interactive"]
    command += ["--tty"] if run.has_terminal else []
    command += [f"--workdir={run.work_dir}", *(f"--env={name}" for name in run.env_names)]
    return [*command, run.name, *run.argv]


def _mounted(bind: Bind) -> str:
    return f"{bind.source}:{bind.target}" + (":ro" if bind.is_read_only else "")


def remove_command(runtime: str, program: str, names: Sequence[str]) -> list[str] | None:
    """The command that ends and removes what is left of containers; None where nothing can be."""
    if runtime != PODMAN:
        return None
    return [program, "--cgroup-manager=cgroupfs", "rm", "--force", "--ignore", "--time=0", *names]


def list_command(runtime: str, program: str, label: str) -> list[str] | None:
    """The command that lists the names of a daemon's containers, one a line; None where runs leave nothing."""
    if runtime != PODMAN:
        return None
    return [program, "ps", "--all", "--filter", f"label={LABEL}={label}", "--format", "{{.Names}}"]


def run_of(name: str, spool: str) -> str | None:
    """The run that a container of this name is of; None for one of another daemon."""
    found, _, mark = name.removeprefix("gpusched-").rpartition("-")
    # Behind job and run there may be the rank.
    return ".".join(found.split(".")[:2]) if mark == _mark(spool) else None


def container_name(run: str, spool: str, rank: int | None = None) -> str:
    """Name of the container of a run, or of one of its ranks: another daemon of the same user has runs of the same
    number.
    """
    return f"gpusched-{run if rank is None else f'{run}.{rank}'}-{_mark(spool)}"


def _mark(text: str) -> str:
    """A text as six hexadecimal digits: FNV-1a, since supervisors do without hashlib."""
    value = 0x811C9DC5
    for byte in text.encode("utf-8", "surrogateescape"):
        value = (value ^ byte) * 0x01000193 & 0xFFFFFFFF
    return f"{value:08x}"[:6]


_PODMAN_PULL = """
program=$1 image=$2 pinned=$3
if [ -n "$pinned" ]; then
    if ! "$program" image exists "$pinned"; then
        case $pinned in
        localhost/* | sha256:*) echo "this node has no image $pinned, which was built on another one"; exit 125 ;;
        esac
        "$program" pull --quiet "$pinned" >/dev/null || exit 125
    fi
    printf '%s\\n' "$pinned"
    exit
fi
case $image in
localhost/*) ;;
*)
    if ! "$program" pull --quiet "$image" >/dev/null; then
        "$program" image exists "$image" || exit 125
        echo "it could not be pulled; the copy on this server is used"
    fi ;;
esac
"$program" image inspect --format '{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}sha256:{{.Id}}{{end}}' "$image"
"""
_APPTAINER_PULL = """
program=$1 image=$2 pinned=$3 folder=${XDG_CACHE_HOME:-$HOME/.cache}/gpusched/images
set -e
umask 077
digest=
case $image in
*@sha256:*) digest=${image##*@sha256:} ;;
esac
if [ -n "$pinned" ] && [ -r "$pinned" ]; then
    printf '%s\\n' "$pinned"
    exit
elif [ -n "$pinned" ] && [ "$pinned" != "$folder/$digest.sif" ]; then
    echo "there is no $pinned: name the image by its digest, NAME@sha256:..., or let nodes share the folder"
    exit 1
fi
mkdir -p "$folder"
part=$(mktemp -d "$folder/pull.XXXXXX")
trap 'rm -rf "$part"' EXIT
trap 'exit 143' HUP INT TERM
"$program" pull "$part/image.sif" "docker://$image"
[ -n "$digest" ] || digest=$(sha256sum "$part/image.sif")
mv -f "$part/image.sif" "$folder/${digest%% *}.sif"
printf '%s\\n' "$folder/${digest%% *}.sif"
"""
_IMAGE_FILE = """
image=$2
test -f "$image" || { echo "there is no file $image"; exit 1; }
test -r "$image" || { echo "you may not read $image"; exit 1; }
printf '%s\\n' "$image"
"""


def pull_command(runtime: str, program: str, image: str, pinned: str = "") -> list[str]:
    """The command that pulls an image; its last line of output names it by digest.

    Args: pinned: what another node has found under that name, and this one is to have. Files of apptainer differ even
    if they are made of the same image: another node makes it only from a digest in the image's own name.

    An image that cannot be pulled, but is there, will do: a server without a way to the registry, an image that was
    built on it.
    """
    of_registry = _PODMAN_PULL if runtime == PODMAN else _APPTAINER_PULL
    text = _IMAGE_FILE if is_image_file(image) else of_registry
    return ["/bin/sh", "-c", text, "gpusched-pull", program, image, pinned]


def inside(env: Mapping[str, str]) -> dict[str, str]:
    """The variables of a job that hold inside a container."""
    found = {name: value for name, value in env.items() if name not in _OUTSIDE and is_variable(name)}
    # An older hook of NVIDIA's would add all GPUs, as images ask for; ours are added by name.
    found["NVIDIA_VISIBLE_DEVICES"] = "void"
    return found


def outside(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of the runtime itself."""
    kept = {name: value for name, value in env.items() if name not in _STEERING}
    folders = kept.get("PATH", "").split(":")
    missing = [one for one in ("/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin") if one not in folders]
    # Helpers such as newuidmap are found by it.
    kept["PATH"] = ":".join(filter(None, (*folders, *missing)))
    return kept


def passed_on(runtime: str, env: Mapping[str, str]) -> dict[str, str]:
    """Variables of the runtime's own environment that bring these into a container which is told their names.

    apptainer needs no names: it takes what begins with its own prefix, besides the file.
    """
    return dict(env) if runtime == PODMAN else {f"APPTAINERENV_{name}": value for name, value in env.items()}


def environment_file(runtime: str, env: Mapping[str, str]) -> tuple[str, list[str]]:
    """The text of the environment file, and the names of variables that it cannot hold.

    podman takes lines as they are, and so none that has several; apptainer reads them as a shell does.
    """
    if runtime == PODMAN:
        kept = {name: value for name, value in env.items() if "\n" not in value and "\r" not in value}
        return _lines(f"{name}={value}" for name, value in kept.items()), [name for name in env if name not in kept]
    return _lines(f"{name}={shlex.quote(value)}" for name, value in env.items()), []


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
