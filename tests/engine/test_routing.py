import contextlib

from rollout.engine.routing import MAX_IMBALANCE, PrefixIndex, Router, Routes


def test_a_session_stays_and_new_ones_go_where_least_is_done():
    router = Router(2)
    assert [router.pick(session) for session in ("a", "b", "c")] == [0, 1, 0]
    with router.request(0), router.request(0), router.request(1):
        assert router.in_flight == (2, 1)
        assert router.pick("d") == 1
        assert router.pick("a") == 0
    assert router.in_flight == (0, 0)


def test_an_unhealthy_server_loses_its_sessions():
    router = Router(2)
    assert router.pick("a") == 0
    router.set_healthy(0, False)
    assert router.pick("a") == 1
    router.set_healthy(1, False)
    assert router.pick("a") is None
    router.set_healthy(0, True)
    assert router.pick("a") == 0


def test_ended_and_forgotten_sessions_count_no_more():
    router = Router(2, remembered=2)
    assert [router.pick(session) for session in ("a", "b")] == [0, 1]
    router.end_session("b")
    router.end_session("b")
    assert router.pick("c") == 1
    assert router.pick("d") == 0  # "a" is forgotten here
    assert router.pick("e") == 0  # one session each; "c" is forgotten here
    assert router.pick("f") == 1


def test_a_failed_request_is_no_longer_in_flight():
    router = Router(1)
    try:
        with router.request(0):
            raise ValueError
    except ValueError:
        assert router.in_flight == (0,)


def test_a_new_session_goes_where_most_of_its_prompt_is_cached():
    router = Router(2, prefixes=PrefixIndex(block=2))
    assert router.pick("a", [1, 2, 3, 4]) == 0
    assert router.pick("b", [9, 8, 7, 6]) == 1
    assert router.pick("c", [9, 8, 7, 6, 5]) == 1
    assert router.pick("d", [1, 2, 3, 4]) == 0
    assert router.pick("e", [1, 2, 3, 4]) == 0  # a group's prompt, though the other server has less to do
    assert router.pick("f", [9, 8, 0, 0, 0, 0]) == 1  # too little is shared to count, and server 1 has fewer sessions


def test_a_cached_prefix_is_not_worth_a_long_queue():
    router = Router(2, prefixes=PrefixIndex(block=2))
    assert router.pick("a", [1, 2]) == 0
    with contextlib.ExitStack() as queue:
        for _ in range(MAX_IMBALANCE):
            queue.enter_context(router.request(0))
        assert router.pick("b", [1, 2]) == 0
        queue.enter_context(router.request(0))
        assert router.pick("c", [1, 2]) == 1


def test_a_server_that_was_started_anew_has_no_prefix():
    router = Router(2, prefixes=PrefixIndex(block=2))
    assert router.pick("a", [1, 2]) == 0
    router.forget_cache(0)
    assert router.pick("b", [1, 2]) == 1


def test_remembered_prefixes_are_bounded():
    prefixes = PrefixIndex(block=1, remembered=3)
    prefixes.add([1, 2], 0)
    prefixes.add([5, 6], 1)
    assert prefixes.shared([1, 2]) == {}  # its first block was the oldest of four
    assert prefixes.shared([5, 6, 7]) == {1: 2}


def test_a_request_to_servers_apart_needs_one_of_each_kind_by_their_index_in_the_fleet():
    routes = Routes(generating=[2, 3], prefill=[0, 1])
    assert routes.kinds == [(2, 3), (0, 1)]
    assert [routes.pick(session) for session in ("a", "b")] == [(2, 0), (3, 1)]
    routes.set_healthy(2, False)
    assert routes.pick("a") == (3, 0)
    routes.set_healthy(0, False)
    routes.set_healthy(1, False)
    assert routes.pick("a") is None
    routes.set_healthy(1, True)
    assert routes.pick("a") == (3, 1)


def test_requests_are_counted_for_each_server_of_a_fleet():
    routes = Routes(generating=[0, 1])
    with routes.request(1):
        assert [routes.in_flight(server) for server in (0, 1)] == [0, 1]
        assert routes.pick("a") == (0,)
    assert routes.in_flight(1) == 0
