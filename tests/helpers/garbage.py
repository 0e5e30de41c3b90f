"""
Searches for garbage that leave out what was there before.

Each run of a trainer and each start of an engine searches everything that the process holds: with torch, TRL and vLLM
imported a million objects, which takes longer than most tests of a tiny model.
"""

import gc


freeze, unfreeze = gc.freeze, gc.unfreeze


def leave_out_all_there_is() -> None:
    """
    Whatever the process holds now is searched no more.

    vLLM freezes its process too when an engine starts, and trl_quant thaws it, so that a trainer can be collected. From
    here on both do nothing: all would be searched again. `test_vllm_notebook` has both, in processes of its own.
    """
    freeze()
    gc.freeze = gc.unfreeze = lambda: None


def search_all_there_is() -> None:
    """Undoes [`leave_out_all_there_is`], with which a process of `warm` begins."""
    gc.freeze, gc.unfreeze = freeze, unfreeze
    unfreeze()
