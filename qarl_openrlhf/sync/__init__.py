"""From the learner's tensors to every engine's parameters: manifest, buckets, transport, publisher, receiver."""
