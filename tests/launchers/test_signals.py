from __future__ import annotations

import os
import select
import signal

import pytest

from duoka.launchers.signals import Signals, blocked, name


def test_signals_become_readable_and_are_put_back_afterwards() -> None:
    before = [signal.getsignal(one) for one in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with Signals() as signals:
        for one in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGINT):
            os.kill(os.getpid(), one)
        assert select.select([signals.fd], [], [], 5)[0]
        signals.read()
        assert signals.stops == [signal.SIGTERM, signal.SIGINT, signal.SIGINT]
        assert signals.interrupts == 2
        signals.read()
        assert len(signals.stops) == 3
    after = [signal.getsignal(one) for one in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals() as signals:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            os.kill(os.getpid(), signal.SIGHUP)
            signals.read()
            assert signals.stops == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_for_scripts_are_kept_apart_and_left_to_who_has_a_handler_of_its_own() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        with Signals() as signals:
            for one in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
                os.kill(os.getpid(), one)
            signals.read()
            assert signals.for_scripts == [signal.SIGUSR1]
            assert signals.stops == [signal.SIGTERM]
            assert seen == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_no_descriptor_is_left_and_restoring_twice_does_no_harm() -> None:
    before = os.listdir("/proc/self/fd")
    with Signals() as signals:
        signals.restore()
    assert os.listdir("/proc/self/fd") == before


def test_blocked_signals_come_afterwards() -> None:
    with Signals() as signals:
        with blocked():
            signal.raise_signal(signal.SIGTERM)
            signals.read()
            assert signals.stops == []
        signals.read()
        assert signals.stops == [signal.SIGTERM]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()


def test_names() -> None:
    assert name(9) == "SIGKILL"
    assert name(40) == "signal 40"
