"""Other ways to make a step: each folder replaces or extends one part of it.

``coupled`` has collectives inside the forward pass, ``virtual`` fixed pieces and a fixed
order of sums, ``memory`` recomputation and a sharded optimizer, ``parallel`` layers split
over ranks or devices, ``custom_step`` a model's own ``train_step``.
"""
