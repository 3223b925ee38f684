//! What both halves of the test need.

use half::f16;
use horizon_core::qpacked::{
    BlockSize, CodecPath, QpackedLayout, QuantizationError, QuantizeError, Quantizer, dequantize_with,
    quantize_with,
};

/// A quantized matrix.
pub struct Packed {
    pub layout: QpackedLayout,
    pub codes: Vec<u8>,
    pub scales: Vec<f16>,
    pub error: QuantizationError,
}

impl Packed {
    pub fn quantize(
        path: CodecPath,
        tensor: &str,
        weights: &[f32],
        (rows, cols): (usize, usize),
        block: BlockSize,
        quantizer: Quantizer,
    ) -> Result<Self, QuantizeError> {
        let layout = QpackedLayout { rows, cols, block };
        // Garbage, which must be gone afterwards.
        let mut codes = vec![0xA5; layout.code_bytes()];
        let mut scales = vec![f16::NAN; layout.scales()];
        let error = quantize_with(path, tensor, weights, &layout, quantizer, &mut codes, &mut scales)?;
        Ok(Self {
            layout,
            codes,
            scales,
            error,
        })
    }

    /// One byte a value, q + 8; checks that the last nibble of an odd row is 8.
    pub fn unpacked(&self) -> Vec<u8> {
        let mut values = Vec::new();
        for row in self.codes.chunks(self.layout.row_bytes().max(1)) {
            let mut nibbles: Vec<u8> = row.iter().flat_map(|b| [b & 0xf, b >> 4]).collect();
            assert!(
                nibbles[self.layout.cols..].iter().all(|n| *n == 8),
                "padding of an odd row"
            );
            nibbles.truncate(self.layout.cols);
            values.extend(nibbles);
        }
        values
    }

    pub fn scale_bits(&self) -> Vec<u16> {
        self.scales.iter().map(|s| s.to_bits()).collect()
    }

    pub fn dequantize(&self, path: CodecPath) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.layout.rows * self.layout.cols];
        dequantize_with(path, &self.layout, &self.codes, &self.scales, &mut out);
        out
    }

    /// The blocks: row, block of the row, range of the weights in the matrix, FP32 scale.
    pub fn blocks(&self) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>, f32)> {
        let QpackedLayout { cols, block, .. } = self.layout;
        let row_blocks = self.layout.row_blocks();
        self.scales.iter().enumerate().map(move |(i, scale)| {
            let (row, of_row) = (i / row_blocks, i % row_blocks);
            let start = of_row * block.get();
            let end = cols.min(start + block.get());
            (row, of_row, row * cols + start..row * cols + end, scale.to_f32())
        })
    }
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}
