"""What Ctrl-C says while a pool opens or closes. The first one gives the machines back; the next one waits for nothing.

opening or open ──first──▶ the machines are given back, and that is waited for
                                 ──next──▶ nothing is waited for: the pool's reaper ends the machines
"""

OPENING = "interrupted while the pool opened: what was rented is given back; interrupt again to wait for nothing"
CLOSING = "interrupted: the pool is closed; interrupt again to wait for nothing"
AGAIN = "interrupted again: nothing is waited for; the reaper or the lease ends the machines"


def waiting_for(name: str) -> str:
    """Return the words for a process that waits until another one has opened a pool with a name."""
    return f"interrupted while another process opens the pool {name}: it goes on there, and nothing was rented here"


def of_program(signal_name: str, what_ends: str, *, is_again: bool) -> str:
    """Return the words for a signal that stops `skyward run`."""
    if is_again:
        return f"{signal_name} again: nothing is waited for; `skyward ps` shows whether something is left"
    return f"{signal_name}: stopping; the program is cancelled, and {what_ends}. Once more to wait for nothing"


def cut_off(pool_id: str, may_run: str) -> str:
    """Return the words for an end that was not waited for. `may_run` says which machines may run, "" if none may."""
    words = f"the end of {pool_id} was interrupted: close the pool again, or its reaper ends it"
    return f"{words}; {may_run}" if may_run else words


def first(error: BaseException) -> BaseException:
    """Return the interrupt that came first, if `error` is one that came while another one was handled."""
    before: BaseException | None = error
    while (before := before.__context__) is not None:
        if isinstance(before, KeyboardInterrupt):
            error = before
    return error


def is_again(error: BaseException | None) -> bool:
    """Return whether this is an interrupt that came while another one was handled."""
    return isinstance(error, KeyboardInterrupt) and first(error) is not error
