"""
What keeps a run safe: its checkpoints, its directory, and limits on what others' code does to it.

| file | idea |
|---|---|
| [`~runs.checkpoints`] | saves the engine's state with a checkpoint, and checks that a run may resume from one |
| [`~runs.record`] | ties a checkpoint to the models, data and ranks of its run, in a manifest |
| [`~runs.unfinished`] | saves the generation that a checkpoint interrupts |
| [`~runs.own_directory`] | locks `output_dir` for one run at a time |
| [`~runs.agreement`] | ends all ranks with the error of one, and compares their settings |
| [`~runs.finite`] | stops at a loss or a gradient that is not finite |
| [`~runs.user_calls`] | limits the time of rewards, tools and environments |
| [`~runs.reward_calls`], [`~runs.rollout_func`] | check what rewards and a `rollout_func` return |

`storage/` has the files themselves: the form of a manifest and of a run's checkpoints, and locks. Rooms below a run
read them too. A time limit on a single call is in [`~rollout.limits`], because engines need it.
"""
