"""Ray actors: OpenRLHF's, with the quantized learner, the packed publish and the objectives in place.

Importing this package applies the patches, so that every Ray worker that unpickles one of these classes has them.
"""

from qarl_openrlhf import patches

patches.apply()

from qarl_openrlhf.actors import varlen_attention  # noqa: E402

varlen_attention.register()
