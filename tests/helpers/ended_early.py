"""What completions of a call that ended early have in common with those of a whole one."""


def at_least(count: int):
    """Enough is when this many completions have ended."""
    return lambda ended: sum(ended) >= count


def prefixes(early, whole) -> None:
    """Completions that have ended are whole, and the others have their first tokens, as of the same moment."""
    lengths = {len(ids) for ids, ended in zip(early.token_ids, early.ended, strict=True) if not ended}
    assert len(lengths) == 1 and lengths != {0}
    rows = zip(early.token_ids, early.logps, early.ended, whole.token_ids, whole.logps, strict=True)
    for ids, logps, ended, all_ids, all_logps in rows:
        assert ids == all_ids[: len(ids)] and logps == all_logps[: len(ids)] and len(logps) == len(ids)
        assert ended == (len(ids) == len(all_ids))
