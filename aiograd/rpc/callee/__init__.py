"""Calls that one peer makes to this worker.

    invocation    one call, request or post, from its frame to its answer
    dispatch      back-pressure, admission, decoding: message to `Invocation`
    execution     right here, as a task, in a thread or as a stream; cancelling, abandoning
    responses     reply, exception, or a result that stays here
    functions     how functions travel and are found again
    exposure      what peers may call that are not trusted: `@expose`

Each module uses those behind it:

    dispatch ─▶ execution ─▶ responses ─▶ invocation ─▶ functions ─▶ exposure
"""
