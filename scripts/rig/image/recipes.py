"""The recipes: what goes into each layer of an image, what its container does, and how one sees that it is ready.

Debian images are bookworm by debootstrap with one layer each for base, runtime and program, as people build them, from
the machine's own package sources. `tiny`, `hello`, `weights` and `big` stand on the busybox of this machine.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from scripts.rig.errors import RigError

__all__ = ["RECIPES", "Generated", "Recipe", "Step", "architecture"]


@dataclass(frozen=True, slots=True)
class Step:
    """One layer: its name and a shell script run with the tree's root as `$1`."""

    name: str
    script: str


@dataclass(frozen=True, slots=True)
class Generated:
    """One layer of pseudo-random files: pairs of path and size in bytes. Each byte carries `bits` random bits: 8 is
    incompressible, 4 shrinks by almost half."""

    name: str
    files: tuple[tuple[str, int], ...]
    bits: int = 8


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image: layers from the lowest up (generated ones last), and the container's command.

    The container is ready with its first line, which matches `ready` (a shell pattern, whole line). `layers_of` names
    the recipe whose image this one runs with a command of its own. `reads` are those generated files that it reads.
    """

    name: str
    steps: tuple[Step | Generated, ...]
    command: tuple[str, ...]
    ready: str
    layers_of: str = ""
    reads: tuple[str, ...] = ()

    @property
    def image(self) -> str:
        """Name of the image in cache and registry."""
        return self.layers_of or self.name

    def is_ready(self, line: str) -> bool:
        """Whether this first line is the right one."""
        return fnmatchcase(line, self.ready)

    def key(self, builder: str = "") -> str:
        """Name of the image in the cache: changes with the layers, the image's own command, and the `builder`."""
        command = RECIPES[self.layers_of].command if self.layers_of else self.command
        text = json.dumps([builder, self.image, [_plain(step) for step in self.steps], command, architecture()])
        return f"{self.image}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def architecture() -> str:
    """This machine's architecture, in the words of OCI."""
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    machine = os.uname().machine
    if machine not in names:
        raise RigError(f"no image recipe for machine type {machine}; known: {', '.join(names)}")
    return names[machine]


def _plain(step: Step | Generated) -> list[object]:
    return [step.name, step.script] if isinstance(step, Step) else [step.name, step.files, step.bits]


_DEBIAN = Step("base", 'debootstrap --variant=minbase bookworm "$1"')
_APT = "apt-get -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends"


def _install(name: str, packages: str, before: str = "", after: str = "") -> Step:
    """A layer of Debian packages. Java's packages want /proc while they are installed."""
    mount = 'mkdir -p "$1/proc"; mount -t proc proc "$1/proc"'
    return Step(name, f'{mount}\n{before}\nchroot "$1" sh -ec "apt-get -qq update; {_APT} install {packages}"\n{after}')


_NUMPY_PROGRAM = "import numpy; print('ready', int(numpy.arange(10).sum()), flush=True)"

NUMPY = Recipe(
    "numpy",
    (
        _DEBIAN,
        Step("runtime", f'chroot "$1" sh -ec "apt-get -qq update; {_APT} install python3"'),
        Step("app", f'chroot "$1" sh -ec "{_APT} install python3-numpy"'),
    ),
    ("/usr/bin/python3", "-c", _NUMPY_PROGRAM),
    "ready 45",
)

_EVERYTHING = "find / -xdev -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"

SCAN = Recipe("scan", NUMPY.steps, ("/bin/sh", "-c", f"echo ready $({_EVERYTHING})"), "ready * -", layers_of="numpy")

_C_PROGRAM = """#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(void) { char *text = malloc(16); strcpy(text, "ready c"); return puts(text) < 0; }
"""

GCC = Recipe(
    "gcc",
    (
        _DEBIAN,
        _install("runtime", "gcc libc6-dev"),
        Step("app", f'mkdir -p "$1/src"\ncat >"$1/src/hello.c" <<\'END\'\n{_C_PROGRAM}END'),
    ),
    ("/bin/sh", "-c", "gcc -O2 -o /tmp/hello /src/hello.c && exec /tmp/hello"),
    "ready c",
)

_JAVA_PROGRAM = """public class Hello {
    public static void main(String[] words) { System.out.println("ready java"); }
}
"""
# The compiler goes into an overlay above the tree, in memory: only its result gets into the image.
_JAVA_APP = f"""
mount -t tmpfs tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/tree
mount -t overlay -o "lowerdir=$1,upperdir=/mnt/upper,workdir=/mnt/work" overlay /mnt/tree
mount -t proc proc /mnt/tree/proc
mkdir -p /mnt/tree/app
cat >/mnt/tree/app/Hello.java <<'END'
{_JAVA_PROGRAM}END
chroot /mnt/tree sh -ec "{_APT} install openjdk-17-jdk-headless; javac -d /app /app/Hello.java"
mkdir -p "$1/app"
cp /mnt/tree/app/Hello.class "$1/app/"
"""

JAVA = Recipe(
    "java",
    (_DEBIAN, _install("runtime", "openjdk-17-jre-headless"), Step("app", _JAVA_APP)),
    ("/usr/bin/java", "-cp", "/app", "Hello"),
    "ready java",
)

_POSTGRES_NO_CLUSTER = """
mkdir -p "$1/etc/postgresql-common"
echo create_main_cluster = false >"$1/etc/postgresql-common/createcluster.conf"
"""
# A key made at installation is another one in each build.
_POSTGRES_NO_KEY = 'rm -f "$1"/etc/ssl/private/ssl-cert-snakeoil.key "$1"/etc/ssl/certs/ssl-cert-snakeoil.pem'
_POSTGRES_APP = """
mkdir -p "$1/app"
cat >"$1/app/start" <<'END'
#!/bin/sh
# A new cluster, then the server until it says that it is ready. All of it ends with this shell.
set -e
bin=/usr/lib/postgresql/15/bin
mkdir -p /srv/data /srv/run
mkfifo /srv/log
chown postgres /srv/data /srv/run
user="setpriv --reuid=postgres --regid=postgres --clear-groups"
$user $bin/initdb -D /srv/data >/dev/null
$user $bin/postgres -D /srv/data -c unix_socket_directories=/srv/run >/srv/log 2>&1 &
exec grep -m 1 -o 'ready to accept connections' /srv/log
END
chmod 755 "$1/app/start"
"""

POSTGRES = Recipe(
    "postgres",
    (
        _DEBIAN,
        _install("runtime", "postgresql-15", _POSTGRES_NO_CLUSTER, _POSTGRES_NO_KEY),
        Step("app", _POSTGRES_APP),
    ),
    ("/app/start",),
    "ready to accept connections",
)

_NODE_PROGRAM = """const http = require('http');
const server = http.createServer((request, response) => response.end('hello'));
server.listen(8000, '127.0.0.1', () => {
  http.get('http://127.0.0.1:8000/', (response) => {
    console.log('ready ' + response.statusCode);
    process.exit(0);
  });
});
"""

NODE = Recipe(
    "node",
    (
        _DEBIAN,
        _install("runtime", "nodejs"),
        Step("app", f'mkdir -p "$1/app"\ncat >"$1/app/server.js" <<\'END\'\n{_NODE_PROGRAM}END'),
    ),
    ("/usr/bin/node", "/app/server.js"),
    "ready 200",
)

_BUSYBOX = """
busybox=$(command -v busybox)
mkdir -p "$1/bin" "$1/etc" "$1/tmp"
cp "$busybox" "$1/bin/busybox"
for applet in sh cat sha256sum wc ls; do ln -s busybox "$1/bin/$applet"; done
for library in $(ldd "$busybox" 2>/dev/null | grep -o '/[^ )]*'); do
    mkdir -p "$1$(dirname "$library")"
    cp -L "$library" "$1$library"
done
echo tiny > "$1/etc/name"
"""
_TINY_DATA = """
mkdir -p "$1/data"
for n in 1 2 3 4 5 6 7 8; do
    awk -v n="$n" 'BEGIN { for (i = 0; i < 20000; i++) printf "%d %d\\n", n, (i * 7919 + n) % 104729 }' >"$1/data/$n"
done
ln "$1/data/1" "$1/data/one"
"""
_TINY_APP = """
rm "$1/data/8"
printf '#!/bin/sh\\necho ready $(cat /data/[1-3] | sha256sum)\\n' >"$1/bin/app"
chmod 755 "$1/bin/app"
"""

TINY = Recipe(
    "tiny",
    (Step("base", _BUSYBOX), Step("runtime", _TINY_DATA), Step("app", _TINY_APP)),
    ("/bin/app",),
    "ready 32738c7922b4ed007ba198c1591acab9b736ff5d1cc4649aac4ce680ef7fdb59 -",
)

HELLO = Recipe("hello", (Step("base", _BUSYBOX),), ("/bin/busybox", "echo", "ready hello"), "ready hello")

_WEIGHTS = ("model/weights.bin", 2 << 30)

WEIGHTS = Recipe(
    "weights",
    (Step("base", _BUSYBOX), Generated("weights", (_WEIGHTS,))),
    ("/bin/sh", "-c", f"cat /{_WEIGHTS[0]} >/dev/null && echo ready $(stat -c %s /{_WEIGHTS[0]})"),  # no computing
    f"ready {_WEIGHTS[1]}",
    reads=(_WEIGHTS[0],),
)


def _big_layer(number: int) -> Generated:
    """One of 49 layers that together with the base come to 8 GB."""
    files = [(f"data/{number:02}/start", 1 << 18), *((f"data/{number:02}/{n:02}", 8 << 20) for n in range(19))]
    return Generated(f"data {number:02}", (*files, (f"data/{number:02}/rest", 4_000_000)), bits=4)


BIG = Recipe(
    "big",
    (Step("base", _BUSYBOX), *(_big_layer(number) for number in range(1, 50))),
    ("/bin/sh", "-c", "echo ready $(cat /data/*/start /data/*[05]/03 | wc -c)"),
    f"ready {49 * (1 << 18) + 9 * (8 << 20)}",
    reads=tuple(f"data/{n:02}/start" for n in range(1, 50)) + tuple(f"data/{n:02}/03" for n in range(5, 50, 5)),
)

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe for recipe in (HELLO, NUMPY, GCC, JAVA, POSTGRES, NODE, SCAN, WEIGHTS, BIG, TINY)
}
