"""YAML as manifests have it: written for people, read with PyYAML's safe loader and with limits.

A reader's file may come from anywhere: it is refused above a size, and so are aliases, by which a short text stands
for a huge one, and keys that are given twice, of which kubectl would silently take the last.
"""

from __future__ import annotations

from gpusched.errors import Refused
from gpusched.model.units import printable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MAX_BYTES = 1 << 20
"""As large as an object may be in a Kubernetes cluster, or nearly so."""
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-")
_WORDS = frozenset("y n yes no on off true false null".split())
"""Plain words that YAML 1.1 takes for something else."""


def yaml_text(document: dict[str, Any]) -> str:
    """The document: maps, lists, texts, numbers and booleans."""
    import yaml  # no other command writes it

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: object) -> bool:
            return True

    def of_text(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=_style(text))

    Dumper.add_representer(str, of_text)
    form = {"default_flow_style": False, "sort_keys": False, "allow_unicode": True, "width": float("inf")}
    text: str = yaml.dump(document, Dumper=Dumper, **form)
    return text


def _style(text: str) -> str | None:
    """Of a text: as it is, as a literal block, or in quotes."""
    is_plain = text[:1].isalpha() or text[:1] == "/"
    if is_plain and _PLAIN.issuperset(text) and text.lower() not in _WORDS:
        return None
    lines = text.split("\n")
    is_block = len(lines) > 1 and lines[0].strip() and lines[0][0] not in " \t"
    return "|" if is_block and all(line.replace("\t", "").isprintable() for line in lines) else '"'


# --- reading --------------------------------------------------------------------------------------------


def read_yaml(content: bytes, name: str) -> Any:
    """The one document of a file. Raises: Refused, naming the line of a mistake.

    Args: name: of the file, for errors.
    """
    shown = printable(name)
    if len(content) > MAX_BYTES:
        raise Refused(
            f"{shown} is larger than {MAX_BYTES >> 20} MiB", "a job file holds one Job; keep data in separate files"
        )
    import yaml  # no other command reads it

    try:
        text = content.decode("utf-8-sig")
        documents = [found for found in yaml.load_all(text, _loader()) if found is not None]
    except UnicodeDecodeError as error:
        raise Refused(f"{shown} is not UTF-8: byte {error.start + 1}", "save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        what = printable(error.problem or error.context or "it cannot be read", 200)
        raise Refused(f"{shown}, line {line}: {what}", _HINT) from None
    except yaml.YAMLError as error:
        raise Refused(f"{shown} is not YAML: {printable(str(error).partition(chr(10))[0], 200)}", _HINT) from None
    except RecursionError:
        raise Refused(f"{shown} is nested too deeply", _HINT) from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # PyYAML's own, for a date such as 2026-99-99, a number of thousands of digits, or !!bool maybe.
        raise Refused(f"{shown} is not YAML: {printable(str(error), 200)}", _HINT) from None
    if len(documents) != 1:
        found = f"holds {len(documents)} documents" if documents else "is empty"
        raise Refused(f"{shown} {found}; gsub reads one Job", "put each Job in its own file")
    return documents[0]


_HINT = "check it with: kubectl create --dry-run=client -f FILE"


def _loader() -> Any:
    """PyYAML's safe loader, without aliases and with each key once."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.MarkedYAMLError(
                    problem=f"the alias *{event.anchor} is not supported: write the value out",
                    problem_mark=event.start_mark,
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen if isinstance(key.value, str) else False:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                    )
                if isinstance(key.value, str):
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

    return Loader
