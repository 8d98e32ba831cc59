"""Who is a member of the cluster, who coordinates it, and what all members agree on.

    roster        who is a member: decisions and copies, without I/O
    succession    who becomes the coordinator when it is lost, without I/O
    termination   when no call is under way anywhere, without I/O
    forms         what is checked of a message before anything of it is used
    member        every worker's end of the membership services
    election      every worker's part in an election
    coordinator   the coordinator's end of the membership services
    collectives   barriers and gathers

Imports go downwards: coordinator ─▶ member ─▶ collectives, election ─▶ forms, succession ─▶ roster;
coordinator ─▶ termination.
"""
