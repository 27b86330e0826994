"""What forward passes need: no caches, independent rows, one thread, and limits on memory.

1. `inference` runs passes without attention or KV caches; `independent_rows` makes rows
   independent of each other.
2. `locking` gives a model to one thread at a time. `module_hooks` finds hooks that users have set,
   among the `modules` of the model.
3. `memory` has the limits on memory and tokens; `offload` reads weights from CPU memory or disk.
"""
