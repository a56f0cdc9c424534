"""`bootseer key`: keys that sign artifacts, and which this node trusts."""

import argparse
import json
import sys
from pathlib import Path

from snapshotter.cli.table import table
from snapshotter.cli.tree import Commands, add_config, written_path
from snapshotter.config import load_config

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "key",
        help="keys that sign artifacts",
        description="Keys sign layer indexes and hot sets in registries; a node uses what a key that it trusts signed.",
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "Make a key pair: the secret key goes into FILE (mode 0600), the public one into FILE.pub."
    generate = verbs.add_parser("generate", help="make a key pair", description=text)
    generate.add_argument("--out", metavar="FILE", type=written_path, required=True, help="where the secret key goes")
    generate.add_argument("--json", action="store_true", help="print the result as JSON")
    generate.set_defaults(run=_generate)
    text = (
        "List the public keys that the configuration trusts. A file that is refused is named on stderr, and exit code"
        " is 1 then; the other keys count all the same."
    )
    list_ = verbs.add_parser("list", help="the keys that are trusted", description=text)
    list_.add_argument("--json", action="store_true", help="print the keys as JSON")
    add_config(list_)
    list_.set_defaults(run=_list)


def _generate(args: argparse.Namespace) -> int:
    from snapshotter.trust.keys import SecretKey

    key = SecretKey.generate()
    public = args.out.with_name(f"{args.out.name}.pub")
    key.save(args.out)
    try:
        key.public.save(public)
    except BaseException:  # both or neither
        args.out.unlink()
        raise
    if args.json:
        print(json.dumps({"key": key.public.name, "secret": str(args.out), "public": str(public)}))
    else:
        print(
            f"key {key.public.name}\nsecret {args.out}: for `--key` where artifacts are published; let nobody read it\n"
            f"public {public}: into a directory that `keys` in [trust] of the nodes names"
        )
    return 0


def _list(args: argparse.Namespace) -> int:
    from snapshotter.trust.keys import KeyRing

    trust = load_config(args.config).trust
    ring = KeyRing.load(map(Path, trust.keys))
    if args.json:
        keys = [{"key": name, "file": str(it.path)} for name, it in ring.keys.items()]
        print(json.dumps({"policy": trust.policy, "keys": keys, "refused": list(ring.refused)}, indent=2))
    else:
        rows = [(name, str(it.path)) for name, it in ring.keys.items()]
        print(table(("KEY", "FILE"), rows) if rows else f"no keys in {', '.join(trust.keys) or 'the configuration'}")
        if trust.policy == "any":
            print('policy = "any" in [trust]: artifacts are used whoever signed them')
    for line in ring.refused:
        print(f"bootseer: {line}", file=sys.stderr)
    return 1 if ring.refused else 0
