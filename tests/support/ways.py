"""Which way a call goes: the short one of a call that repeats an earlier one, or the long one."""

from __future__ import annotations

from attnroute.api import dispatch, repeats


def ways_taken(monkeypatch):
    """Return a list that gets "short" or "long" for each call from now on."""
    found = []
    short, long = repeats.run, dispatch.run

    def taken(*arguments):
        out = short(*arguments)
        found.extend([] if out is None else ["short"])
        return out

    monkeypatch.setattr(repeats, "run", taken)
    monkeypatch.setattr(dispatch, "run", lambda given: found.append("long") or long(given))
    return found
