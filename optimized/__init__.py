"""What production runs: FlashInfer's megakernels. Imports no GPU library until a kernel is called."""
