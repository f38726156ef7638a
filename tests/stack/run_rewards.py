"""Rewards for test_run.py, found by import path."""


def parity(prompt, responses):
    """1 for answers with an even sum of bytes: any model gets varied rewards."""
    return [float(sum(response.encode()) % 2 == 0) for response in responses]


def fail_on_third(prompt, responses):
    if prompt.prompt_id == 3:
        raise ValueError("broken on purpose")
    return parity(prompt, responses)
