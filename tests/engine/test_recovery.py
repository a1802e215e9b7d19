"""The law of ``rollout.engine.recovery``, for any order of events."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout.engine.recovery import UNKNOWN, Do, FleetRecovery, Phase, RecoveryConfig

SERVERS = st.integers(0, 2)
CONFIG = RecoveryConfig(missed_heartbeats=2, max_restarts=2, backoff_s=1.0, backoff_max_s=3.0, stable_s=10.0)


class Fleet(RuleBasedStateMachine):
    """Three servers, of which this knows what each really holds."""

    def __init__(self):
        super().__init__()
        self.recovery = FleetRecovery(CONFIG, 3, 0)
        self.now = 0.0
        self.routed = set()
        self.held = [0, 0, 0]
        self.loads = {}
        self.killed = set()
        self.given_up = set()
        self.participants = None

    def do(self, actions):
        for action in actions:
            index = action.server
            if action.do is Do.ROUTE:
                self.routed.add(index)
            elif action.do is Do.UNROUTE:
                self.routed.discard(index)
            elif action.do is Do.KILL:
                self.killed.add(index)
                self.loads.pop(index, None)
            elif action.do is Do.START:
                assert index in self.killed
                self.killed.discard(index)
                self.held[index] = 0
            elif action.do is Do.LOAD:
                assert self.participants is None
                assert index not in self.loads
                self.loads[index] = self.recovery.version
            elif action.do is Do.GIVE_UP:
                self.given_up.add(index)

    @rule(index=SERVERS)
    def first_token(self, index):
        if index not in self.killed:
            self.do(self.recovery.generates(index))

    @rule(index=SERVERS)
    def loaded(self, index):
        if index in self.loads:
            self.held[index] = self.loads.pop(index)
            self.do(self.recovery.joined(index, self.held[index], self.now))

    @rule(index=SERVERS, answered=st.booleans())
    def heartbeat(self, index, answered):
        self.do(self.recovery.heartbeat(index, answered, self.now))

    @rule(index=SERVERS)
    def connection_breaks(self, index):
        self.do(self.recovery.suspected(index))

    @rule(index=SERVERS)
    def dies(self, index):
        self.do(self.recovery.died(index, "killed", self.now))

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds):
        self.now += seconds
        self.do(self.recovery.tick(self.now))

    @precondition(lambda self: self.participants is None)
    @rule()
    def publication_begins(self):
        self.participants = self.recovery.publish_begun()

    @precondition(lambda self: self.participants is not None)
    @rule(outcome=st.sampled_from(["new", "old", "mixed"]))
    def publication_ends(self, outcome):
        version = self.recovery.version
        holds = {"new": version + 1, "old": version, "mixed": UNKNOWN}[outcome]
        serving = (Phase.SERVING, Phase.SUSPECT)
        for index in self.participants:
            if self.recovery.phase(index) in serving:
                self.held[index] = holds
        self.participants = None
        self.do(self.recovery.publish_ended(holds))

    @invariant()
    def requests_meet_the_current_weights_only(self):
        if self.participants is None:
            assert all(self.held[index] == self.recovery.version for index in self.routed)

    @invariant()
    def routed_are_those_that_serve(self):
        assert self.routed == set(self.recovery.serving)

    @invariant()
    def no_server_stands_idle(self):
        """Whatever waits is waiting for something: a token, a load, a publication's end, or its time."""
        for index in range(3):
            if self.recovery.phase(index) is Phase.JOINING and self.participants is None:
                assert index in self.loads

    @invariant()
    def the_lost_stay_lost(self):
        assert {i for i in range(3) if self.recovery.phase(i) is Phase.LOST} == self.given_up
        assert all(self.recovery.restarts(i) <= CONFIG.max_restarts for i in range(3))


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def serving(config=CONFIG):
    recovery = FleetRecovery(config, 1, 7)
    recovery.generates(0)
    recovery.joined(0, 7, now=0.0)
    return recovery


def test_backoff_doubles_up_to_its_limit_and_is_forgotten_after_a_stable_time():
    recovery = serving(CONFIG.model_copy(update={"max_restarts": 9}))
    waits, now = [], 0.0
    for _ in range(4):
        recovery.died(0, "killed", now)
        wait = 0.0
        while not recovery.tick(now + wait):
            wait += 0.5
        waits.append(wait)
        now += wait
        recovery.generates(0)
        recovery.joined(0, 7, now)
    assert waits == [1.0, 2.0, 3.0, 3.0]
    assert recovery.restarts(0) == 4
    recovery.heartbeat(0, True, now + 9.0)
    assert recovery.restarts(0) == 4
    recovery.heartbeat(0, True, now + 10.0)
    assert recovery.restarts(0) == 0


def test_one_missed_heartbeat_takes_a_server_out_and_the_next_one_that_comes_puts_it_back():
    recovery = serving()
    assert [action.do for action in recovery.heartbeat(0, False, 1.0)] == [Do.UNROUTE]
    assert [action.do for action in recovery.heartbeat(0, True, 2.0)] == [Do.ROUTE]
    recovery.heartbeat(0, False, 3.0)
    assert [action.do for action in recovery.heartbeat(0, False, 4.0)] == [Do.UNROUTE, Do.KILL]
