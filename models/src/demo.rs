//! The demo models: two small trained checkpoints that are kept in the project in compressed form.
//!
//! `stories-olmoe` is embedded in the binary (feature `embedded-demo`) and is what runs when no model is named;
//! `stories-qwen2moe` is a test asset. `assets/README.md` has their provenance. The weights of each are one file,
//! `weights.planes.zst`: BF16 values compress better when their low and their high bytes stand apart, so the file is
//! the zstd form of the safetensors header followed by the low bytes of all values, then their high bytes.

use std::collections::BTreeMap;

use thiserror::Error;

/// Most bytes that a restored weights file may have.
const MAX_RESTORED: usize = 1 << 26;

/// A single-file checkpoint that lies in memory: what a checkpoint directory would hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InMemoryCheckpoint {
    /// `config.json`, `tokenizer.json` and the other small files, by name.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The bytes of `model.safetensors`.
    pub safetensors: Vec<u8>,
}

/// Why a compressed asset cannot be restored.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum DemoError {
    /// Not zstd, cut off, or too large.
    #[error("the compressed file is damaged or larger than {MAX_RESTORED} bytes: {0}")]
    Compressed(String),
    /// Decompressed, but not a safetensors header followed by two planes of equal size.
    #[error("the decompressed file is not a safetensors header and two byte planes: {0}")]
    Layout(&'static str),
}

/// The model that runs when none is named: `stories-olmoe`.
///
/// # Errors
/// None with the assets as they are in the project; a test holds them to their checksum.
#[cfg(feature = "embedded-demo")]
pub fn embedded() -> Result<InMemoryCheckpoint, DemoError> {
    macro_rules! asset {
        ($name:literal) => {
            include_bytes!(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/assets/stories-olmoe/",
                $name
            ))
        };
    }
    let plain: [(&str, &[u8]); 4] = [
        ("config.json", asset!("config.json")),
        ("generation_config.json", asset!("generation_config.json")),
        ("special_tokens_map.json", asset!("special_tokens_map.json")),
        ("tokenizer_config.json", asset!("tokenizer_config.json")),
    ];
    let mut files: BTreeMap<String, Vec<u8>> = plain
        .iter()
        .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()))
        .collect();
    files.insert(
        "tokenizer.json".to_owned(),
        decompress(asset!("tokenizer.json.zst"))?,
    );
    Ok(InMemoryCheckpoint {
        files,
        safetensors: restore_weights(asset!("weights.planes.zst"))?,
    })
}

/// Name of the embedded model.
pub const EMBEDDED_NAME: &str = "stories-olmoe";

/// Decompresses a zstd file of at most 64 MiB.
///
/// # Errors
/// When it is damaged or larger.
pub fn decompress(compressed: &[u8]) -> Result<Vec<u8>, DemoError> {
    zstd::bulk::decompress(compressed, MAX_RESTORED).map_err(|e| DemoError::Compressed(e.to_string()))
}

/// From the bytes of a `weights.planes.zst` to those of the `model.safetensors` that it was made from.
///
/// # Errors
/// When the file is damaged.
pub fn restore_weights(compressed: &[u8]) -> Result<Vec<u8>, DemoError> {
    let split = decompress(compressed)?;
    let (header, planes) = split.split_at(data_begin(&split)?);
    let (low, high) = planes.split_at(planes.len() / 2);
    let mut whole = vec![0; split.len()];
    let (begin, values) = whole.split_at_mut(header.len());
    begin.copy_from_slice(header);
    for ((value, low), high) in values.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
        *value = [*low, *high];
    }
    Ok(whole)
}

/// The opposite of [`restore_weights`], before compression.
///
/// # Errors
/// When the bytes are no safetensors file, or its data has an odd number of bytes.
pub fn split_planes(safetensors: &[u8]) -> Result<Vec<u8>, DemoError> {
    let (header, data) = safetensors.split_at(data_begin(safetensors)?);
    let values = data.as_chunks::<2>().0;
    let mut split = header.to_vec();
    split.extend(values.iter().map(|v| v[0]));
    split.extend(values.iter().map(|v| v[1]));
    Ok(split)
}

/// Where the data of a safetensors file begins: after the length of the header and the header.
fn data_begin(file: &[u8]) -> Result<usize, DemoError> {
    let length = file
        .first_chunk::<8>()
        .ok_or(DemoError::Layout("no header length"))?;
    let begin = u64::from_le_bytes(*length)
        .checked_add(8)
        .and_then(|n| usize::try_from(n).ok())
        .filter(|n| *n <= file.len())
        .ok_or(DemoError::Layout("the header is longer than the file"))?;
    if !(file.len() - begin).is_multiple_of(2) {
        return Err(DemoError::Layout("an odd number of data bytes"));
    }
    Ok(begin)
}
