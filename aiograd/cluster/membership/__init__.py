"""Who is a member of the cluster, who coordinates it, and what all members agree on.

    roster        who is a member: decisions and copies, without I/O
    succession    who becomes the coordinator when it is lost, without I/O
    termination   when no call is under way anywhere, without I/O
    member        every worker's end of the membership services
    coordinator   the coordinator's end of the membership services
    collectives   barriers and gathers

Imports go downwards: coordinator ─▶ member ─▶ collectives, roster, succession; coordinator ─▶
termination.
"""
