"""What a plan tells: the published documents and the status, from the draft's final views."""

from dataclasses import replace
from typing import Any

from encodepool_operator.api import names

from . import endpoints, status
from .draft import Draft
from .group import GroupView, Phase


def documents(draft: Draft) -> dict[str, str]:
    """The documents as they should be published after the plan.

    Raises ValueError if the gateway would reject the list, which the facts about groups rule out.
    """
    meta = draft.pool.metadata
    listed = draft.listed()
    lines = []
    for index in sorted(draft.views):
        view = draft.views[index]
        entry = endpoints.endpoint(
            meta.namespace,
            meta.name,
            view,
            draft.spec_of(view),
            ready=index in listed,
            draining=view.draining,
            reason=_why_not_listed(view),
        )
        if entry is not None:
            lines.append(draft.memo.rendered(meta.name, entry))
    wanted = endpoints.documents(meta.namespace, meta.name, names.served_model_name(draft.spec), lines)
    before = draft.snapshot.documents or {}
    if wanted[endpoints.WORKERS] != before.get(endpoints.WORKERS):
        problems = endpoints.manifest_problems(wanted[endpoints.WORKERS])
        if problems:
            raise ValueError(f"the gateway would reject the list: {'; '.join(problems)}")
    return wanted


def change_of_list(draft: Draft, wanted: dict[str, str]) -> str:
    """One sentence about the change from what is published to ``wanted``."""
    now_listed = endpoints.listed_ids(wanted)
    added = sorted(now_listed - draft.published)
    removed = sorted(draft.published - now_listed)
    parts = [f"gains {', '.join(added)}"] if added else []
    parts += [f"loses {', '.join(removed)}"] if removed else []
    change = " and ".join(parts) or "tells more about groups that are not in it"
    return f"the list {change}; {len(now_listed)} of {draft.spec.replicas} groups are in it"


def pool_status(draft: Draft) -> dict[str, Any]:
    """The status as it should read after the plan; notes when it changes by time alone."""
    views = list(draft.views.values())
    hosts = {}
    for view in views:
        leader = view.leader
        if leader is not None:
            hosts[view.index] = endpoints.address(leader, draft.spec_of(view).network.ip_family)
    pool = status.PoolView(
        pool=draft.pool,
        views=views,
        target=draft.target.name,
        budget=draft.budget,
        listed=draft.listed(),
        hosts=hosts,
        last_incarnation=draft.book.last,
        current_revision=draft.current,
        no_ports=draft.no_ports,
        foreign=draft.snapshot.foreign,
        troubles=draft.snapshot.troubles,
    )
    if status.complete(pool) and all(
        view.record is not None and view.record.revision == draft.target.name for view in views
    ):
        pool = replace(pool, current_revision=draft.target.name)
    built = status.build(pool, draft.snapshot.status, draft.now)
    if built.wake_at is not None:
        draft.wakes.append(built.wake_at)
    return built.document


def _why_not_listed(view: GroupView) -> str:
    """Coarser than the status: every change of it rewrites the list for all its readers."""
    if view.phase in (Phase.FAILING, Phase.BACKOFF, Phase.LOST):
        return view.why
    if view.draining or view.phase is Phase.DRAINING:
        return "it is being drained"
    if view.phase is Phase.STOPPED:
        return "it is stopped"
    if view.record is not None and view.record.withdrawn_at is not None:
        return "it was taken off the list"
    return "it is starting"
