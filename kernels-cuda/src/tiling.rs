//! Weights as the kernels read them: the one tiling of an expert record, and of a non-routed matrix.
//!
//! `include/tile.cuh` describes the bytes; the functions here write them. A record is its pair tiles (gate and up,
//! interleaved by eight rows) followed by the tiles of its down matrix.

use half::f16;
use horizon_core::memory::align_up;
use horizon_core::record::{ExpertEncoding, MatrixLayout, RecordLayout, RecordTiling};
use horizon_core::roles::ExpertMatrix;

/// Rows of a tile.
pub const TILE_ROWS: usize = 16;
/// Columns of a span.
pub const SPAN: usize = 64;

/// Form of a tiled matrix; the numbers are `Encoding` of `tile.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileEncoding {
    /// FP16.
    F16,
    /// 8-bit codes, a scale every 32 columns.
    Q8,
    /// 4-bit codes, a scale every `block` columns.
    Int4 {
        /// Columns a scale.
        block: usize,
    },
}

impl TileEncoding {
    fn span_bytes(self) -> usize {
        match self {
            Self::F16 => 2048,
            Self::Q8 => 1024,
            Self::Int4 { .. } => 512,
        }
    }

    /// Columns a scale; 0 without scales.
    #[must_use]
    pub fn block(self) -> usize {
        match self {
            Self::F16 => 0,
            Self::Q8 => 32,
            Self::Int4 { block } => block,
        }
    }

    /// Bytes of one tile of a matrix with that many columns.
    #[must_use]
    pub fn tile_bytes(self, columns: usize) -> usize {
        let scales = match self.block() {
            0 => 0,
            block => columns.div_ceil(block) * 2 * TILE_ROWS,
        };
        columns.div_ceil(SPAN) * self.span_bytes() + scales
    }

    /// Bytes of a matrix.
    #[must_use]
    pub fn matrix_bytes(self, rows: usize, columns: usize) -> usize {
        rows.div_ceil(TILE_ROWS) * self.tile_bytes(columns)
    }
}

impl From<ExpertEncoding> for TileEncoding {
    fn from(encoding: ExpertEncoding) -> Self {
        match encoding {
            ExpertEncoding::Qpacked { block } => Self::Int4 { block: block.get() },
            ExpertEncoding::F16 => Self::F16,
        }
    }
}

/// Where column `c` of a span stands: (product, lane % 4, element of the product's four).
fn place(c: usize) -> (usize, usize, usize) {
    let within = c % 32;
    (c / 32 * 2 + within % 8 / 4, within / 8, within % 4)
}

/// Writes one tile of FP16 values; `value(row, column)` is asked for rows below 16 and columns below `columns`.
pub fn tile_f16(columns: usize, tile: &mut [u8], value: impl Fn(usize, usize) -> u16) {
    tile.fill(0);
    for column in 0..columns {
        let (product, t, element) = place(column % SPAN);
        let span = column / SPAN * 2048 + product * 512;
        for row in 0..TILE_ROWS {
            let lane = row % 8 * 4 + t;
            let register = row / 8 + element / 2 * 2;
            let at = span + lane * 16 + register * 4 + element % 2 * 2;
            tile[at..at + 2].copy_from_slice(&value(row, column).to_le_bytes());
        }
    }
}

/// Writes one tile of 8-bit codes and their scales (FP16 bits, one every 32 columns).
pub fn tile_q8(
    columns: usize,
    tile: &mut [u8],
    code: impl Fn(usize, usize) -> i8,
    scale: impl Fn(usize, usize) -> u16,
) {
    let spans = columns.div_ceil(SPAN) * 1024;
    tile[..spans].fill(128);
    tile[spans..].fill(0);
    for column in 0..columns {
        let (product, t, element) = place(column % SPAN);
        let half = column / SPAN * 1024 + product / 2 * 512;
        for row in 0..TILE_ROWS {
            let lane = row % 8 * 4 + t;
            let at = half + lane * 16 + row / 8 * 8 + product % 2 * 4 + element;
            tile[at] = (code(row, column).cast_unsigned()).wrapping_add(128);
        }
    }
    write_scales(&mut tile[spans..], columns.div_ceil(32), scale);
}

/// Writes one tile of 4-bit codes (0 to 15) and their scales (FP16 bits, one every `block` columns).
pub fn tile_int4(
    columns: usize,
    block: usize,
    tile: &mut [u8],
    code: impl Fn(usize, usize) -> u8,
    scale: impl Fn(usize, usize) -> u16,
) {
    let spans = columns.div_ceil(SPAN) * 512;
    tile[..spans].fill(0x88);
    tile[spans..].fill(0);
    for column in 0..columns {
        let (product, t, element) = place(column % SPAN);
        for row in 0..TILE_ROWS {
            let word = column / SPAN * 512 + (row % 8 * 4 + t) * 16 + product * 4;
            // Nibbles 0 and 4 are a0, 1 and 5 a1, 2 and 6 a2, 3 and 7 a3.
            let nibble = row / 8 + element / 2 * 2 + element % 2 * 4;
            let (byte, shift) = (word + nibble / 2, nibble % 2 * 4);
            tile[byte] = tile[byte] & !(15 << shift) | code(row, column) << shift;
        }
    }
    write_scales(&mut tile[spans..], columns.div_ceil(block), scale);
}

fn write_scales(out: &mut [u8], blocks: usize, scale: impl Fn(usize, usize) -> u16) {
    for block in 0..blocks {
        for row in 0..TILE_ROWS {
            let at = (block * 8 + row % 8) * 4 + row / 8 * 2;
            out[at..at + 2].copy_from_slice(&scale(row, block).to_le_bytes());
        }
    }
}

/// The tiling of expert records, one for all executors.
#[derive(Clone, Copy, Debug, Default)]
pub struct FragmentTiles;

/// Bytes of the parts of a tiled record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordTiles {
    /// Form of the three matrices.
    pub encoding: TileEncoding,
    /// Gate (or up) rows.
    pub width: usize,
    /// Rows of down.
    pub hidden: usize,
    /// Bytes of the pair tiles; the down tiles start there.
    pub pair_bytes: usize,
    /// Bytes of the record, a multiple of the alignment.
    pub bytes: usize,
}

impl RecordTiles {
    /// The tiles of a canonical record.
    #[must_use]
    pub fn new(layout: &RecordLayout) -> Self {
        let down = layout.matrix(ExpertMatrix::Down);
        let (hidden, width) = (down.rows, down.cols);
        let encoding = TileEncoding::from(layout.encoding);
        let pair_bytes = encoding.matrix_bytes(2 * width, hidden);
        Self {
            encoding,
            width,
            hidden,
            pair_bytes,
            bytes: align_up(pair_bytes + encoding.matrix_bytes(hidden, width)),
        }
    }
}

/// One matrix of a canonical record.
struct Canonical<'a> {
    layout: &'a MatrixLayout,
    encoding: ExpertEncoding,
    bytes: &'a [u8],
}

impl Canonical<'_> {
    fn f16_at(&self, start: usize, index: usize) -> u16 {
        let at = start + index * 2;
        u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]])
    }

    fn value(&self, row: usize, column: usize) -> u16 {
        if row >= self.layout.rows {
            return 0;
        }
        self.f16_at(self.layout.values.start, row * self.layout.cols + column)
    }

    fn code(&self, row: usize, column: usize) -> u8 {
        if row >= self.layout.rows {
            return 8;
        }
        let byte = self.bytes[self.layout.values.start + (row * self.layout.cols + column) / 2];
        byte >> (column % 2 * 4) & 15
    }

    fn scale(&self, row: usize, block: usize) -> u16 {
        let ExpertEncoding::Qpacked { block: size } = self.encoding else {
            return 0;
        };
        if row >= self.layout.rows {
            return 0;
        }
        let blocks = self.layout.cols.div_ceil(size.get());
        self.f16_at(self.layout.scales.start, row * blocks + block)
    }
}

/// Writes tiles of `columns` columns whose row `r` of tile `i` is row `source(i, r)` of one of the matrices.
fn write_tiles(
    encoding: TileEncoding,
    columns: usize,
    out: &mut [u8],
    matrices: [&Canonical<'_>; 2],
    source: impl Fn(usize, usize) -> (usize, usize),
) {
    for (i, tile) in out.chunks_exact_mut(encoding.tile_bytes(columns)).enumerate() {
        match encoding {
            TileEncoding::F16 => tile_f16(columns, tile, |r, c| {
                let (matrix, row) = source(i, r);
                matrices[matrix].value(row, c)
            }),
            TileEncoding::Int4 { block } => tile_int4(
                columns,
                block,
                tile,
                |r, c| {
                    let (matrix, row) = source(i, r);
                    matrices[matrix].code(row, c)
                },
                |r, b| {
                    let (matrix, row) = source(i, r);
                    matrices[matrix].scale(row, b)
                },
            ),
            TileEncoding::Q8 => unreachable!("routed experts are never q8"),
        }
    }
}

impl RecordTiling for FragmentTiles {
    fn name(&self) -> &'static str {
        "cuda-fragments"
    }

    fn tiled_bytes(&self, layout: &RecordLayout) -> usize {
        RecordTiles::new(layout).bytes
    }

    fn tile(&self, layout: &RecordLayout, canonical: &[u8], tiled: &mut [u8]) {
        let tiles = RecordTiles::new(layout);
        let of = |matrix| Canonical {
            layout: layout.matrix(matrix),
            encoding: layout.encoding,
            bytes: canonical,
        };
        let (gate, up, down) = (
            of(ExpertMatrix::Gate),
            of(ExpertMatrix::Up),
            of(ExpertMatrix::Down),
        );
        let down_bytes = tiles.encoding.matrix_bytes(tiles.hidden, tiles.width);
        let (pairs, rest) = tiled.split_at_mut(tiles.pair_bytes);
        let (downs, padding) = rest.split_at_mut(down_bytes);
        write_tiles(tiles.encoding, tiles.hidden, pairs, [&gate, &up], |i, r| {
            (r / 8, i * 8 + r % 8)
        });
        write_tiles(tiles.encoding, tiles.width, downs, [&down, &down], |i, r| {
            (0, i * TILE_ROWS + r)
        });
        padding.fill(0);
    }
}

/// A row-major FP16 matrix `[rows, columns]` as tiles.
///
/// # Panics
/// When the matrix or `out` has another size.
pub fn tile_matrix_f16(rows: usize, columns: usize, values: &[f16], out: &mut [u8]) {
    assert_eq!(values.len(), rows * columns, "size of the matrix");
    assert_eq!(
        out.len(),
        TileEncoding::F16.matrix_bytes(rows, columns),
        "size of its tiles"
    );
    let bytes = TileEncoding::F16.tile_bytes(columns);
    for (i, tile) in out.chunks_exact_mut(bytes).enumerate() {
        tile_f16(columns, tile, |r, c| {
            let row = i * TILE_ROWS + r;
            if row < rows {
                values[row * columns + c].to_bits()
            } else {
                0
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use horizon_core::qpacked::BlockSize;

    use super::*;

    /// Reads a tile back the way a lane does, and puts every element where the fragment layout of the product says.
    fn read_int4(columns: usize, block: usize, tile: &[u8]) -> Vec<Vec<(u8, u16)>> {
        let spans = columns.div_ceil(SPAN);
        let mut out = vec![vec![(0, 0); columns]; TILE_ROWS];
        for span in 0..spans {
            for lane in 0..32 {
                let (g, t) = (lane / 4, lane % 4);
                for product in 0..4 {
                    let at = span * 512 + lane * 16 + product * 4;
                    let word = u32::from_le_bytes(tile[at..at + 4].try_into().expect("four bytes"));
                    for register in 0..4 {
                        for element in 0..2 {
                            let code = (word >> (4 * register + 16 * element) & 15) as u8;
                            let row = g + register % 2 * 8;
                            let column = span * 64
                                + product / 2 * 32
                                + 8 * t
                                + product % 2 * 4
                                + register / 2 * 2
                                + element;
                            if column < columns {
                                let scale = spans * 512 + (column / block * 8 + g) * 4 + register % 2 * 2;
                                let scale = u16::from_le_bytes([tile[scale], tile[scale + 1]]);
                                out[row][column] = (code, scale);
                            } else {
                                assert_eq!(code, 8, "padding has the value zero");
                            }
                        }
                    }
                }
            }
        }
        out
    }

    #[test]
    fn a_lane_finds_every_code_and_scale_where_the_product_wants_it() {
        for (hidden, width, block) in [
            (64, 32, BlockSize::B32),
            (72, 40, BlockSize::B64),
            (192, 88, BlockSize::B256),
        ] {
            let layout = RecordLayout::of_shape(hidden, width, ExpertEncoding::Qpacked { block });
            let canonical: Vec<u8> = (0..layout.bytes).map(|i| (i * 131 % 251) as u8).collect();
            let tiles = RecordTiles::new(&layout);
            let mut tiled = vec![0xAA; tiles.bytes];
            FragmentTiles.tile(&layout, &canonical, &mut tiled);
            let at = |matrix, row: usize, column: usize| {
                let m = Canonical {
                    layout: layout.matrix(matrix),
                    encoding: layout.encoding,
                    bytes: &canonical,
                };
                (m.code(row, column), m.scale(row, column / block.get()))
            };
            let pair = tiles.encoding.tile_bytes(hidden);
            for (i, tile) in tiled[..tiles.pair_bytes].chunks_exact(pair).enumerate() {
                let got = read_int4(hidden, block.get(), tile);
                for (matrix, rows) in [(ExpertMatrix::Gate, &got[..8]), (ExpertMatrix::Up, &got[8..16])] {
                    for (r, row) in rows.iter().enumerate() {
                        for (c, found) in row[..hidden].iter().enumerate() {
                            assert_eq!(*found, at(matrix, i * 8 + r, c));
                        }
                    }
                }
            }
            let down = tiles.encoding.tile_bytes(width);
            for (i, tile) in tiled[tiles.pair_bytes..].chunks_exact(down).enumerate() {
                let got = read_int4(width, block.get(), tile);
                for (r, row) in got[..TILE_ROWS].iter().enumerate() {
                    for (c, found) in row[..width].iter().enumerate() {
                        let want = if i * 16 + r < hidden {
                            at(ExpertMatrix::Down, i * 16 + r, c)
                        } else {
                            (8, 0)
                        };
                        assert_eq!(*found, want, "tile {i}, row {r}, column {c}");
                    }
                }
            }
        }
    }

    #[test]
    fn olmoe_records_have_no_padding() {
        let layout = RecordLayout::of_shape(
            2048,
            1024,
            ExpertEncoding::Qpacked {
                block: BlockSize::B256,
            },
        );
        assert_eq!(RecordTiles::new(&layout).bytes, layout.payload_bytes());
    }
}
