"""Programs that stand in for podman and apptainer: they record how they were called, and run the command on the spot.

They behave as the real ones in what gpusched relies on: exit codes, lines of output, a container that goes on when
podman alone is killed, and is known by its name until it is removed.
"""

from __future__ import annotations

from pathlib import Path

_PODMAN = """#!/bin/sh
here={here}
echo "$*" >> "$here/calls"
while [ "${{1#--}}" != "$1" ]; do shift; done
verb=$1; shift
case $verb in
pull)
    case $2 in *none-such*) echo "Error: initializing source docker://$2: manifest unknown" >&2; exit 125 ;; esac
    [ ! -e "$here/full" ] || {{ echo "Error: writing blob: no space left on device" >&2; exit 125; }}
    [ ! -e "$here/slow" ] || sleep 600
    touch "$here/image" ;;
image)
    [ -e "$here/image" ] || exit 1
    [ "$1" = exists ] || echo "${{4%%:*}}@sha256:{digest}" ;;
exec)
    passed=
    while [ "${{1#-}}" != "$1" ]; do
        case $1 in
        --workdir=*) cd "${{1#--workdir=}}" || exit 126 ;;
        --env=*) passed="$passed ${{1#--env=}}" ;;
        esac
        shift
    done
    name=$1; shift
    grep -qx "$name" "$here/names" || {{ echo "Error: no container with name $name" >&2; exit 125; }}
    for one in $passed; do eval "export inside_$one=\\"\\$$one\\""; done
    CONTAINER_NAME=$name exec "$@" ;;
ps) cat "$here/names" 2>/dev/null ;;
rm)
    while [ "${{1#--}}" != "$1" ]; do shift; done
    for name; do
        [ ! -e "$here/names" ] || sed -i "/^$name\\$/d" "$here/names"
    done ;;
run)
    passed=
    while [ "${{1#-}}" != "$1" ]; do
        case $1 in
        --name=*) name=${{1#--name=}} ;;
        --workdir=*) cd "${{1#--workdir=}}" || exit 126 ;;
        --env-file=*) file=${{1#--env-file=}} ;;
        --env=*) passed="$passed ${{1#--env=}}" ;;
        esac
        shift
    done
    image=$1; shift
    echo "$name" >> "$here/names"
    while IFS= read -r line; do export "inside_${{line%%=*}}=${{line#*=}}"; done < "$file"
    for one in $passed; do eval "export inside_$one=\\"\\$$one\\""; done
    CONTAINER_IMAGE=$image CONTAINER_NAME=$name "$@"
    code=$?
    [ -e "$here/forgets" ] || sed -i "/^$name\\$/d" "$here/names"
    exit $code ;;
esac
"""
_APPTAINER = """#!/bin/sh
here={here}
echo "$*" >> "$here/calls"
while [ "${{1#--}}" != "$1" ]; do shift; done
verb=$1; shift
case $verb in
pull)
    case $2 in *none-such*) echo "FATAL:   While making image: manifest unknown" >&2; exit 255 ;; esac
    [ ! -e "$here/slow" ] || sleep 600
    echo "image $2" > "$1" ;;
exec)
    while [ "${{1#-}}" != "$1" ]; do
        case $1 in
        --pwd=*) cd "${{1#--pwd=}}" || exit 255 ;;
        --env-file=*) file=${{1#--env-file=}} ;;
        esac
        shift
    done
    image=$1; shift
    [ -r "$image" ] || {{ echo "FATAL:   could not open image $image" >&2; exit 255; }}
    set -a; . "$file"; set +a
    for name in $(env | sed -n 's/^\\(APPTAINERENV_[A-Za-z0-9_]*\\)=.*/\\1/p'); do
        eval "export ${{name#APPTAINERENV_}}=\\"\\$$name\\""
    done
    export CONTAINER_IMAGE="$image"
    exec "$@" ;;
esac
"""
DIGEST = "0123456789abcdef" * 4


class StandIns:
    """Both programs in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        for name, text in (("podman", _PODMAN), ("apptainer", _APPTAINER)):
            program = folder / name
            program.write_text(text.format(here=folder, digest=DIGEST))
            program.chmod(0o755)

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def calls(self) -> list[str]:
        """Their arguments, one call a line."""
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []

    def names(self) -> list[str]:
        """Containers that podman knows."""
        path = self.folder / "names"
        return path.read_text().split() if path.exists() else []

    def be_slow(self, is_slow: bool = True) -> None:
        """Let pulls take for ever."""
        (self.folder / "slow").touch() if is_slow else (self.folder / "slow").unlink()
