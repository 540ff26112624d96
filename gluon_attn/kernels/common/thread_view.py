"""A score tile seen as its threads hold it, for arithmetic that stays within a thread."""

from gluon_attn.runtime.compat import constexpr_function, gl, jit


@constexpr_function
def threads_per_row(layout):
    """A wgmma accumulator spreads a row over a quad of threads, two neighbouring columns of every eight each; tensor
    memory is loaded a row to a thread."""
    return 4 if isinstance(layout, gl.NVMMADistributedLayout) else 1


@constexpr_function
def thread_shape(shape, layout):
    threads = threads_per_row(layout)
    return [shape[0], shape[1] // (2 * threads), threads, 2]


@jit
def thread_view(x):
    """[M, N] as [M, N / 2T, T, 2], T threads to a row: axes 1 and 3 lie within a thread. Costs no instruction."""
    SHAPE: gl.constexpr = thread_shape(x.shape, x.type.layout)
    return x.reshape(SHAPE)


@jit
def rows_of_view(view):
    """Row numbers [M] of a thread's view."""
    return gl.arange(0, view.shape[0], gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, view.type.layout))))


@jit
def columns_of_view(view):
    """The column of each element of a thread's view as a sum: what is a constant in every thread, the same in all, and
    what the thread adds."""
    layout: gl.constexpr = view.type.layout
    groups = gl.arange(0, view.shape[1], gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    threads = gl.arange(0, view.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    constant = (view.shape[2] * 2) * groups[None, :, None, None] + pair[None, None, None, :]
    return constant, (2 * threads)[None, None, :, None]


@jit
def halves(x):
    """The left and the right half of the columns of x [M, N]. No thread gives anything away."""
    return gl.split(x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute((0, 2, 1)))


@jit
def keep_first_columns(x, columns, other, DIAGONAL: gl.constexpr):
    """`other` where the column is not below `columns`, a scalar; if DIAGONAL, in row m not below `columns` + m.

    In the thread's view a column is a constant plus what the thread adds; with the latter moved to the other side, each
    comparison is with a constant and no column number occupies a register. A thread of a wgmma accumulator has rows m
    and m + 8. If DIAGONAL, the 8 is moved too, and row m + 8 in a group of eight columns is compared as row m is in the
    group before: half of the comparisons are left.
    """
    view = thread_view(x)
    column, limit = columns_and_limits(view, columns, threads_per_row(x.type.layout), DIAGONAL)
    kept = gl.where(column < limit, view, other)
    return gl.convert_layout(kept.reshape(x.shape), x.type.layout, assert_trivial=True)


@jit
def hide_first_columns(x, columns, other):
    """`other` in row m where the column is below `columns` + m, compared as in `keep_first_columns`."""
    view = thread_view(x)
    column, limit = columns_and_limits(view, columns, threads_per_row(x.type.layout), DIAGONAL=True)
    kept = gl.where(column < limit, other, view)
    return gl.convert_layout(kept.reshape(x.shape), x.type.layout, assert_trivial=True)


@jit
def columns_and_limits(view, columns, THREADS: gl.constexpr, DIAGONAL: gl.constexpr):
    """What `keep_first_columns` compares, in a thread's view: the first is less where the column is below."""
    rows = rows_of_view(view)
    column, of_thread = columns_of_view(view)
    if not DIAGONAL:
        limits = columns + rows * 0
    elif THREADS == 1:
        limits = columns + rows
    else:
        limits = columns + (rows & ~8)
        column = column - (rows & 8)[:, None, None, None]
    return column, limits[:, None, None, None] - of_thread


@jit
def ramp(start, row_step, column_step, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """start + row_step * m + column_step * n at row m, column n: [M, N] fp32. The numbers given are scalars.

    As in `keep_first_columns`, a column is a constant plus what the thread adds, which is added once for all of them:
    so each element costs one multiply-add, with a constant.
    """
    view = thread_view(gl.zeros(SHAPE, gl.float32, LAYOUT))
    of_row = start + row_step * rows_of_view(view).to(gl.float32)
    column, of_thread = columns_of_view(view)
    first = of_row[:, None, None, None] + column_step * of_thread.to(gl.float32)
    values = first + column_step * column.to(gl.float32)
    return gl.convert_layout(values.reshape(SHAPE), LAYOUT, assert_trivial=True)


@jit
def keep_columns_from(x, column, rows, other, DIAGONAL: gl.constexpr):
    """`other` in all rows but the first `rows`; if DIAGONAL, in row m also where the column is below `column` + m.

    As in `keep_first_columns`, each comparison is with a constant.
    """
    if not DIAGONAL:
        index = gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
        return gl.where((index < rows)[:, None], x, other)
    view = thread_view(x)
    row = rows_of_view(view)
    columns, of_thread = columns_of_view(view)
    limits = gl.where(row < rows, column + row, x.shape[1])
    kept = gl.where(columns >= limits[:, None, None, None] - of_thread, view, other)
    return gl.convert_layout(kept.reshape(x.shape), x.type.layout, assert_trivial=True)


@jit
def rows_of(x):
    """Row numbers [M] of x [M, N], for the limits that `keep_columns` takes."""
    return rows_of_view(thread_view(x))


@jit
def keep_columns(x, first, end, other):
    """`other` in row m where the column is not one of first[m] ... end[m] - 1, numbers made of `rows_of(x)`. Either may
    be None, for no limit.

    As in `keep_first_columns`, each comparison is with a constant. But a row has limits of its own, and so each element
    comparisons of its own.
    """
    view = thread_view(x)
    column, of_thread = columns_of_view(view)
    if first is None:
        kept = column < end[:, None, None, None] - of_thread
    elif end is None:
        kept = column >= first[:, None, None, None] - of_thread
    else:
        after_first = column >= first[:, None, None, None] - of_thread
        kept = after_first & (column < end[:, None, None, None] - of_thread)
    return gl.convert_layout(gl.where(kept, view, other).reshape(x.shape), x.type.layout, assert_trivial=True)
