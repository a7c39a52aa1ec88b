"""Operations that do more than compute: one table of what the partition does with them.

An operation without a rule runs whole on every rank. That is right as long as every rank
gets the same result from the same operands:

    pure       TensorFlow does not call it stateful: the result follows from the operands
    EQUAL      its state is a variable, a table or a list, which every rank has alike
    SHOWN      others see its effect, such as a line of text: rank 0 runs it alone
    the rest   clocks, samplers without a seed, functions of Python, and whatever is not
               known here: every rank runs it, and all take the result of rank 0

So a value that differs between ranks is never computed with, and no branch that depends
on it can send some ranks to an exchange that others never reach.
"""

from __future__ import annotations

from collective.training.partition.graph import Node

# Operations on a state that every rank has, and those that hand on what they are given.
_EQUAL = """
    ReadVariableOp VarIsInitializedOp VariableShape ResourceGather ResourceGatherNd
    ResourceCountUpTo ResourceInitializedOp
    RngReadAndSkip StatefulRandomBinomial StatefulStandardNormal
    StatefulStandardNormalV2 StatefulTruncatedNormal StatefulUniform
    StatefulUniformFullInt StatefulUniformInt StatelessRandomGetAlg
    LookupTableFindV2 LookupTableSizeV2
    TensorArrayConcatV3 TensorArrayGatherV3 TensorArrayGradV3 TensorArrayGradWithShape
    TensorArrayReadV3 TensorArrayScatterV3 TensorArraySizeV3 TensorArraySplitV3
    TensorArrayV3 TensorArrayWriteV3 StackPopV2 StackPushV2
    CheckNumerics CheckNumericsV2 DebugIdentityV2 DebugIdentityV3 DeepCopy GuaranteeConst
    SleepIdentityOp Empty
"""
EQUAL = frozenset(_EQUAL.split())

# Operations whose effect others see, and that write no variable.
_SHOWN = """
    Print PrintV2
    CloseSummaryWriter CreateSummaryDbWriter CreateSummaryFileWriter FlushSummaryWriter
    ImportEvent WriteAudioSummary WriteGraphSummary WriteHistogramSummary
    WriteImageSummary WriteRawProtoSummary WriteScalarSummary WriteSummary
    DumpTensor MergeV2Checkpoints Save SaveSlices SaveV2 WriteFile
"""
SHOWN = frozenset(_SHOWN.split())

#: Not called stateful, but without a seed they draw one.
SEEDED = frozenset(["FractionalAvgPool", "FractionalMaxPool"])

# The collectives of a program give each rank what the program asks for.
_OWN_COLLECTIVES = ("Collective", "Horovod")


def may_differ(node: Node) -> bool:
    """Return whether ranks may get different results from the same operands."""
    if node.type in SEEDED:
        return not (node.attr("seed") or node.attr("seed2"))
    if not node.is_stateful or node.type in EQUAL or node.type in SHOWN:
        return False
    return not node.type.startswith(_OWN_COLLECTIVES)
