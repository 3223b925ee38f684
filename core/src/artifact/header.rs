//! The header of a safetensors file: eight bytes of length, then JSON, then the tensors' bytes without gaps.

use std::collections::HashSet;
use std::fmt;

use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use thiserror::Error;

use crate::dtype::DType;

/// Longest header accepted, in bytes.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor as a header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderEntry {
    /// Name.
    pub name: String,
    /// Element type, in the format's own words.
    pub dtype: String,
    /// Extents.
    pub shape: Vec<u64>,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A header that cannot be right.
#[derive(Debug, Error)]
pub enum HeaderError {
    /// The file cannot even hold the length.
    #[error("the file has {0} bytes; a safetensors file starts with 8 bytes of header length")]
    NoLength(u64),
    /// The declared length is beyond the limit.
    #[error("the header claims {0} bytes; at most {MAX_HEADER_BYTES} are accepted")]
    TooLong(u64),
    /// The declared length is beyond the file.
    #[error(
        "the header claims {header} bytes, but the file has only {file}; it is truncated or not safetensors"
    )]
    BeyondFile {
        /// Bytes claimed.
        header: u64,
        /// Bytes of the file.
        file: u64,
    },
    /// The header is not the JSON that it should be.
    #[error("the header is not valid: {0}")]
    Json(#[from] serde_json::Error),
    /// A name occurs twice.
    #[error("tensor {0} is listed twice")]
    Duplicate(String),
    /// The range of a tensor does not lie in the file.
    #[error(
        "tensor {name}: bytes {start}..{end} of the data lie outside the file, which has {available}; \
         the file is truncated or damaged"
    )]
    OutOfRange {
        /// Tensor.
        name: String,
        /// First byte, from the start of the data.
        start: u64,
        /// One past the last.
        end: u64,
        /// Bytes of data in the file.
        available: u64,
    },
    /// Shape and type ask for another number of bytes than the range has.
    #[error("tensor {name}: {dtype} {shape:?} does not take {bytes} bytes")]
    Size {
        /// Tensor.
        name: String,
        /// Element type.
        dtype: String,
        /// Extents.
        shape: Vec<u64>,
        /// Bytes of the range.
        bytes: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {0} and {1} overlap")]
    Overlap(String, String),
    /// Bytes that belong to no tensor.
    #[error("{bytes} bytes at {at} of the data belong to no tensor")]
    Gap {
        /// Position in the data.
        at: u64,
        /// Length.
        bytes: u64,
    },
}

/// Bits of an element type of the format, or `None` for a name not known here.
fn bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E5M2FNUZ" | "F8_E4M3FNUZ" => 8,
        "I16" | "U16" | "F16" | "BF16" => 16,
        "I32" | "U32" | "F32" => 32,
        "I64" | "U64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// The element type of that name, if weights may have it.
#[must_use]
pub fn dtype_of(name: &str) -> Option<DType> {
    Some(match name {
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        "F32" => DType::F32,
        "U8" => DType::U8,
        _ => return None,
    })
}

/// Length of the JSON, checked against the limit and the file before anything is reserved.
///
/// # Errors
/// [`HeaderError`] when the length cannot be right.
pub fn json_length(first: [u8; 8], file_bytes: u64) -> Result<usize, HeaderError> {
    let claimed = u64::from_le_bytes(first);
    if claimed > MAX_HEADER_BYTES {
        return Err(HeaderError::TooLong(claimed));
    }
    if claimed > file_bytes.saturating_sub(8) {
        return Err(HeaderError::BeyondFile {
            header: claimed,
            file: file_bytes,
        });
    }
    usize::try_from(claimed).map_err(|_| HeaderError::TooLong(claimed))
}

/// Parses the JSON of a header, in order of position. Every byte of the data belongs to exactly one tensor.
///
/// # Errors
/// [`HeaderError`] naming the tensor that is wrong.
pub fn parse(json: &[u8], file_bytes: u64) -> Result<Vec<HeaderEntry>, HeaderError> {
    let start = 8 + json.len() as u64;
    let available = file_bytes.saturating_sub(start);
    let Listing(listing) = serde_json::from_slice(json)?;
    let mut names = HashSet::with_capacity(listing.len());
    let mut entries = Vec::with_capacity(listing.len());
    for (name, raw) in &listing {
        if !names.insert(name.as_str()) {
            return Err(HeaderError::Duplicate(name.clone()));
        }
        entries.push(entry(name, raw, available)?);
    }
    entries.sort_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    let mut at = 0;
    let mut last = "";
    for e in &entries {
        if e.offset < at {
            return Err(HeaderError::Overlap(last.to_owned(), e.name.clone()));
        }
        if e.offset > at {
            return Err(HeaderError::Gap {
                at,
                bytes: e.offset - at,
            });
        }
        at = e.offset + e.bytes;
        last = &e.name;
    }
    if at != available {
        return Err(HeaderError::Gap {
            at,
            bytes: available - at,
        });
    }
    for e in &mut entries {
        e.offset += start;
    }
    Ok(entries)
}

fn entry(name: &str, raw: &RawEntry, available: u64) -> Result<HeaderEntry, HeaderError> {
    let [start, end] = raw.data_offsets;
    if start > end || end > available {
        return Err(HeaderError::OutOfRange {
            name: name.to_owned(),
            start,
            end,
            available,
        });
    }
    let bytes = end - start;
    let wrong = || HeaderError::Size {
        name: name.to_owned(),
        dtype: raw.dtype.clone(),
        shape: raw.shape.clone(),
        bytes,
    };
    if let Some(bits) = bits(&raw.dtype) {
        let needed = raw
            .shape
            .iter()
            .try_fold(bits, |n, d| n.checked_mul(*d))
            .ok_or_else(wrong)?;
        if needed % 8 != 0 || needed / 8 != bytes {
            return Err(wrong());
        }
    }
    Ok(HeaderEntry {
        name: name.to_owned(),
        dtype: raw.dtype.clone(),
        shape: raw.shape.clone(),
        offset: start,
        bytes,
    })
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The tensors of a header in the order of the text, repeated names kept.
struct Listing(Vec<(String, RawEntry)>);

impl<'de> Deserialize<'de> for Listing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = Listing;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with one entry for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Listing, A::Error> {
                let mut out = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        out.push((name, map.next_value()?));
                    }
                }
                Ok(Listing(out))
            }
        }
        deserializer.deserialize_map(Tensors)
    }
}

/// The header, length included, of a file that holds `tensors` in this order and nothing else. Padded with
/// spaces so that the data starts at a multiple of 8.
#[must_use]
pub fn encode<'a>(tensors: impl IntoIterator<Item = (&'a str, DType, &'a [usize])>) -> Vec<u8> {
    use std::fmt::Write as _;
    let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut at = 0u64;
    for (name, dtype, shape) in tensors {
        let end = at + shape.iter().product::<usize>() as u64 * dtype.size() as u64;
        let name = serde_json::Value::from(name);
        write!(json, r#",{name}:{{"dtype":"{dtype}","shape":["#).expect("writing to a string cannot fail");
        for (i, d) in shape.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            write!(json, "{comma}{d}").expect("writing to a string cannot fail");
        }
        write!(json, r#"],"data_offsets":[{at},{end}]}}"#).expect("writing to a string cannot fail");
        at = end;
    }
    json.push('}');
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut out = (json.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(json.as_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(json: &str, data: u64) -> Result<Vec<HeaderEntry>, HeaderError> {
        parse(json.as_bytes(), 8 + json.len() as u64 + data)
    }

    #[test]
    fn what_is_encoded_is_parsed_and_read_by_the_reference_library() {
        let tensors = [
            ("b \"quoted\"", DType::U8, &[3usize, 4][..]),
            ("a", DType::F16, &[5]),
            ("scalar", DType::F32, &[]),
            ("none", DType::BF16, &[0, 7]),
        ];
        let mut file = encode(tensors);
        let header = file.len();
        file.extend(0..26u8);
        assert_eq!(
            json_length(file[..8].try_into().expect("8 bytes"), file.len() as u64).expect("sound") + 8,
            header
        );
        assert_eq!(header % 8, 0);
        let entries = parse(&file[8..header], file.len() as u64).expect("sound");
        let theirs = safetensors::SafeTensors::deserialize(&file).expect("the reference library reads it");
        for (name, dtype, shape) in tensors {
            let e = entries.iter().find(|e| e.name == name).expect("listed");
            let view = theirs.tensor(name).expect("listed");
            assert_eq!(e.dtype, dtype.to_string());
            assert_eq!(view.shape(), shape);
            let at = usize::try_from(e.offset).expect("small");
            assert_eq!(
                &file[at..at + usize::try_from(e.bytes).expect("small")],
                view.data()
            );
        }
    }

    #[test]
    fn every_wrong_header_has_its_own_error() {
        type Check = fn(&HeaderError) -> bool;
        let t = |name: &str, dtype: &str, shape: &str, a: u64, b: u64| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{a},{b}]}}"#)
        };
        let cases: [(String, u64, Check); 12] = [
            (t("x", "F16", "[2]", 0, 4), 3, |e| {
                matches!(e, HeaderError::OutOfRange { .. })
            }),
            (t("x", "F16", "[2]", 4, 0), 4, |e| {
                matches!(e, HeaderError::OutOfRange { .. })
            }),
            (t("x", "F16", "[3]", 0, 4), 4, |e| {
                matches!(e, HeaderError::Size { .. })
            }),
            (t("x", "F32", "[4294967296,4294967296]", 0, 4), 4, |e| {
                matches!(e, HeaderError::Size { .. })
            }),
            (t("x", "F4", "[3]", 0, 1), 1, |e| {
                matches!(e, HeaderError::Size { .. })
            }),
            (t("x", "U8", "[4]", 0, 4), 5, |e| {
                matches!(e, HeaderError::Gap { at: 4, bytes: 1 })
            }),
            (t("x", "U8", "[4]", 1, 5), 5, |e| {
                matches!(e, HeaderError::Gap { at: 0, bytes: 1 })
            }),
            (t("x", "U8", "[-1]", 0, 4), 4, |e| {
                matches!(e, HeaderError::Json(_))
            }),
            (t("x", "U8", "[4]", 0, 4).replace("dtype", "type"), 4, |e| {
                matches!(e, HeaderError::Json(_))
            }),
            ("1".into(), 0, |e| matches!(e, HeaderError::Json(_))),
            (
                t("x", "U8", "[4]", 0, 4) + "," + &t("x", "U8", "[4]", 4, 8),
                8,
                |e| matches!(e, HeaderError::Duplicate(n) if n == "x"),
            ),
            (
                t("x", "U8", "[4]", 0, 4) + "," + &t("y", "U8", "[4]", 2, 6),
                6,
                |e| matches!(e, HeaderError::Overlap(a, b) if a == "x" && b == "y"),
            ),
        ];
        for (body, data, check) in cases {
            let error = parse_text(&format!("{{{body}}}"), data).expect_err(&body);
            assert!(check(&error), "{body}: {error}");
        }
    }

    #[test]
    fn a_length_of_two_to_the_63_reserves_nothing() {
        assert!(matches!(
            json_length((1u64 << 63).to_le_bytes(), 1 << 40),
            Err(HeaderError::TooLong(_))
        ));
        assert!(matches!(
            json_length(100u64.to_le_bytes(), 107),
            Err(HeaderError::BeyondFile { .. })
        ));
        assert_eq!(json_length(99u64.to_le_bytes(), 107).expect("fits"), 99);
    }

    #[test]
    fn types_unknown_here_are_listed_all_the_same() {
        let entries =
            parse_text(r#"{"x":{"dtype":"Q9","shape":[3],"data_offsets":[0,5]}}"#, 5).expect("listed");
        assert_eq!(
            (entries[0].dtype.as_str(), dtype_of(&entries[0].dtype)),
            ("Q9", None)
        );
    }
}
