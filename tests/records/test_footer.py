"""The sizes that the footer of a Parquet file gives, read without pyarrow."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from swiftsure.records.footer import column_sizes


def test_sizes_are_those_that_pyarrow_reads(tmp_path):
    path = tmp_path / "file.parquet"
    columns = {f"number {k}": np.arange(50.0) for k in range(20)}
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(100)), 2)
    table = pa.table(columns | {"text": [str(k % 7) for k in range(50)], "list": lists})
    pq.write_table(table.replace_schema_metadata({"key": "v" * 9_000}), path, row_group_size=20)
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    parts = [[group.column(k) for k in range(metadata.num_columns)] for group in groups]
    expected = [[(each.num_values, each.total_uncompressed_size) for each in row] for row in parts]
    assert len(expected) == 3
    assert column_sizes(path) == expected


def test_a_footer_that_is_cut_short_is_damaged(tmp_path):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"a": [1.0, 2.0]}), path)
    content = path.read_bytes()
    size = int.from_bytes(content[-8:-4], "little")
    for left in range(0, size, 7):
        footer = content[-8 - size :][:left]
        path.write_bytes(content[:100] + footer + left.to_bytes(4, "little") + b"PAR1")
        with pytest.raises(ValueError, match="its footer is damaged"):
            column_sizes(path)
