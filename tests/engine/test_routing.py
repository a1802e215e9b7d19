from rollout.engine.routing import Router


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
