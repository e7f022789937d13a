"""Names of everything a pool owns, and the rules for the pool's own name."""

import re

from .types import Spec

NAME_LIMIT = 40
"""``<pool>-<group>-<pod>`` and the controller-revision label of its pods must stay within 63."""

NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label that starts with a letter: the name becomes part of Service names."""


def name_problem(name: str) -> str | None:
    """What is wrong with a pool's name, None if nothing."""
    if not name:
        return "is required"
    if len(name) > NAME_LIMIT:
        return f"must be at most {NAME_LIMIT} characters, has {len(name)}"
    if not re.fullmatch(NAME_PATTERN, name):
        return f"must be lower case letters, digits and '-', starting with a letter, is {name!r}"
    return None


def group_object(pool: str, group: int) -> str:
    """The group's StatefulSet."""
    return f"{pool}-{group}"


def pod(pool: str, group: int, index: int) -> str:
    return f"{pool}-{group}-{index}"


def pod_pattern(pool: str) -> str:
    """A group's object with the group left open, as templates have it."""
    return f"{pool}-{{group}}"


def peers_service(pool: str) -> str:
    return f"{pool}-peers"


def encode_service(pool: str) -> str:
    return f"{pool}-encode"


def endpoints_config_map(pool: str) -> str:
    return f"{pool}-endpoints"


def disruption_budget(pool: str) -> str:
    return f"{pool}-leaders"


def revision_object(pool: str, revision: str) -> str:
    """The ControllerRevision that keeps ``revision`` (a hash)."""
    return f"{pool}-{revision}"


def endpoint_id(namespace: str, pool: str, group: int, incarnation: int) -> str:
    """Identity of one start of a group in every published list."""
    return f"{namespace}/{pool}/{group}-{incarnation}"


def served_model_name(spec: Spec) -> str:
    """The name that gateways route by: chosen, else the hub name, else the folder's last part."""
    if spec.publish.served_model_name:
        return spec.publish.served_model_name
    if spec.model.name:
        return spec.model.name
    return spec.model.path.rstrip("/").rsplit("/", 1)[-1]
