"""What users and editors see by name: made from the tables, with stubs that `make stubs` writes.

    methods       Methods: operators and methods of Tensor, attached by the tables
    operations    all operations by their public names
    linalg        the operations of `np.linalg`
    fft           the operations of `np.fft`

Nothing is imported here: Tensor is made on top of `methods`, and the operations on top of Tensor.
"""
