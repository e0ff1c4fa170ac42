"""Parity over the nodes of a group: what any m of them held can be rebuilt from the others.

    codes       XOR and Reed-Solomon over GF(256): one block from k others
    groups      which nodes are together, and who keeps which parity of whom
    parts       what a node holds of a step, as k blocks of whole checksum chunks
    objects     how parity lies on a disk: a directory of files, committed as every other
    encoding    reads k nodes' blocks, each byte verified, and publishes the parity of them
    rebuilding  a lost node's part, as a level that it can be brought from

Idea: a node writes nothing but in its own directory, and reads what others hold. So there is nobody to be
fenced, and what is visible is whole.

Source: RAID 5 and 6; FTI, SCR and VeloC (parity over groups of nodes); ISA-L.
"""
