"""Rewards of messages, which tests name on a command line as a user names his own: `messages.spread`."""


def spread(completions, **kwargs) -> list[float]:
    """A reward that differs within every group."""
    return [sum(map(ord, message["content"])) % 97 / 97 for (message,) in completions]


def spread_of_texts(completions, **kwargs) -> list[float]:
    """`training.spread` of completions that are messages."""
    from training import spread

    return spread([messages[0]["content"] for messages in completions])
