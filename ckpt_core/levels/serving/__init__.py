"""A directory of this node served to the other nodes of a job: what `peer://` speaks to.

    PeerServer(folder, keys, bind)     one process; serves until it is closed
      wire         one connection: requests within limits, bodies, answers
      allowing     who may: signatures with the job's keys
      answering    what is asked: the subset of S3 that the levels need, and 501 for the rest
      uploads      objects that come in parts
      linking      a file of a step that is here once more, in another step
      tree         objects as files: whole and durable before they have their name

Idea: another node is one more object store, so that nothing of the levels has to know of it: `far` speaks to
it, the agent sends there, a restore brings from there. A key is a path, so what is kept is a root as any
other, and can be looked at where it lies.

Source: Gemini (SOSP '23), checkpoints in the memory of other machines.
"""
