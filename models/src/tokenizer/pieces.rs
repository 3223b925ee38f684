//! The bytes that each token stands for, derived from the kind of decoder that `tokenizer.json` names.
//!
//! | decoder | bytes of a token |
//! | --- | --- |
//! | `ByteLevel` | each character is one byte of the GPT-2 alphabet |
//! | `Sequence` of `Replace` and `ByteFallback`, then `Fuse`, then `Strip` (sentencepiece style) | after the replacements, `<0xHH>` is that byte and all else its UTF-8; leading spaces of the text are stripped |
//! | `Metaspace` | the replacement character is a space; none at the start of the text |
//! | `Fuse`, or none of the above | other kinds are left to the `tokenizers` crate |
//!
//! Added tokens stand for their own spelling under every decoder.

use serde_json::Value;

use super::{MAX_TOKEN_ID, TokenizerError};

/// How a sequence of tokens becomes text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    /// The tokens' bytes in a row; at the beginning of a text up to `strip` leading spaces are dropped.
    Bytes { strip: usize },
    /// The tokens' bytes in a row, but the text's first token loses this character altogether.
    Metaspace { replacement: char },
    /// A token's text depends on its neighbours in a way known only to the `tokenizers` crate.
    Library,
}

/// A table over all token ids.
pub(super) struct Pieces {
    bytes: Vec<u8>,
    /// Where each token's bytes end; they begin where the token before ends.
    ends: Vec<u32>,
    special: Vec<bool>,
    joining: Joining,
}

impl Pieces {
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Result<Self, TokenizerError> {
        let added = tokenizer.get_added_tokens_decoder();
        let vocabulary = tokenizer.get_vocab(true);
        let last = vocabulary.values().chain(added.keys()).max().copied();
        if let Some(id) = last.filter(|id| *id > MAX_TOKEN_ID) {
            return Err(TokenizerError::IdOutOfRange(id));
        }
        let decoder = tokenizer.get_decoder().map(serde_json::to_value).transpose();
        let decoder = decoder.map_err(|e| TokenizerError::Invalid(e.to_string()))?;
        let (joining, mapping) = classify(decoder.as_ref());
        let count = last.map_or(0, |id| id + 1);
        let mut pieces = Self {
            bytes: Vec::new(),
            ends: Vec::with_capacity(count as usize),
            special: Vec::with_capacity(count as usize),
            joining,
        };
        for id in 0..count {
            if let Some(token) = added.get(&id) {
                pieces.bytes.extend_from_slice(token.content.as_bytes());
            } else if let Some(token) = tokenizer.id_to_token(id) {
                mapping.apply(token, &mut pieces.bytes);
            }
            let end = u32::try_from(pieces.bytes.len());
            pieces
                .ends
                .push(end.map_err(|_| TokenizerError::Invalid("its tokens exceed 4 GiB".to_owned()))?);
            pieces.special.push(added.get(&id).is_some_and(|t| t.special));
        }
        Ok(pieces)
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn joining(&self) -> Joining {
        self.joining
    }

    pub(super) fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else { return &[] };
        let begin = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.bytes[begin as usize..*end as usize]
    }

    pub(super) fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }
}

/// From a token's spelling in the vocabulary to its bytes.
enum Mapping {
    ByteLevel,
    Text {
        replace: Vec<(String, String)>,
        byte_fallback: bool,
    },
}

impl Mapping {
    fn apply(&self, token: String, out: &mut Vec<u8>) {
        match self {
            Self::ByteLevel => {
                let begin = out.len();
                for c in token.chars() {
                    let Some(b) = byte_of(c) else {
                        // Outside the alphabet: not an encoding of bytes at all.
                        out.truncate(begin);
                        out.extend_from_slice(token.as_bytes());
                        return;
                    };
                    out.push(b);
                }
            }
            Self::Text {
                replace,
                byte_fallback,
            } => {
                let token = replace
                    .iter()
                    .fold(token, |t, (from, to)| t.replace(from.as_str(), to));
                match Some(&token)
                    .filter(|_| *byte_fallback)
                    .and_then(|t| fallback_byte(t))
                {
                    Some(b) => out.push(b),
                    None => out.extend_from_slice(token.as_bytes()),
                }
            }
        }
    }
}

/// `<0x0A>` is the byte 10.
fn fallback_byte(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    if digits.len() != 2 || !digits.bytes().all(|d| d.is_ascii_hexdigit()) {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// GPT-2's byte alphabet: printable Latin-1 characters are their own bytes, and the 68 other bytes are the
/// characters from U+0100 on, in order.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

fn classify(decoder: Option<&Value>) -> (Joining, Mapping) {
    let plain = |replace| Mapping::Text {
        replace,
        byte_fallback: false,
    };
    let library = (Joining::Library, plain(Vec::new()));
    let Some(decoder) = decoder else { return library };
    let steps: Vec<&Value> = match decoder["decoders"].as_array() {
        Some(steps) if decoder["type"] == "Sequence" => steps.iter().collect(),
        _ => vec![decoder],
    };
    if let [step] = steps[..] {
        if step["type"] == "ByteLevel" {
            return (Joining::Bytes { strip: 0 }, Mapping::ByteLevel);
        }
        if step["type"] == "Metaspace" {
            let Some(replacement) = step["replacement"].as_str().and_then(|s| s.chars().next()) else {
                return library;
            };
            let joining = if step["prepend_scheme"] == "never" {
                Joining::Bytes { strip: 0 }
            } else {
                Joining::Metaspace { replacement }
            };
            return (joining, plain(vec![(replacement.to_string(), " ".to_owned())]));
        }
    }
    sentencepiece(&steps).unwrap_or(library)
}

/// `Replace*`, `ByteFallback?`, `Fuse`, `Strip?` with literal replacements and spaces stripped at the start only.
fn sentencepiece(steps: &[&Value]) -> Option<(Joining, Mapping)> {
    let mut steps = steps.iter().copied().peekable();
    let mut replace = Vec::new();
    while let Some(step) = steps.next_if(|s| s["type"] == "Replace") {
        replace.push((
            step["pattern"]["String"].as_str()?.to_owned(),
            step["content"].as_str()?.to_owned(),
        ));
    }
    let byte_fallback = steps.next_if(|s| s["type"] == "ByteFallback").is_some();
    steps.next_if(|s| s["type"] == "Fuse")?;
    let mut strip = 0;
    if let Some(step) = steps.next_if(|s| s["type"] == "Strip") {
        if step["content"] != " " || step["stop"] != 0 {
            return None;
        }
        strip = usize::try_from(step["start"].as_u64()?).ok()?;
    }
    if steps.next().is_some() {
        return None;
    }
    Some((
        Joining::Bytes { strip },
        Mapping::Text {
            replace,
            byte_fallback,
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for c in (0..0x200u32).filter_map(char::from_u32) {
            if let Some(b) = byte_of(c) {
                assert!(
                    !std::mem::replace(&mut seen[usize::from(b)], true),
                    "{c:?} and another are byte {b}"
                );
            }
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(
            (byte_of('Ġ'), byte_of('Ċ'), byte_of('Ń')),
            (Some(b' '), Some(b'\n'), Some(0xad))
        );
        assert_eq!(byte_of(' '), None);
    }

    #[test]
    fn only_two_hex_digits_are_a_byte() {
        assert_eq!(fallback_byte("<0x0A>"), Some(10));
        assert_eq!(fallback_byte("<0xfF>"), Some(255));
        for token in ["<0x+A>", "<0x0>", "<0x0AB>", "0x0A", "<0xé>"] {
            assert_eq!(fallback_byte(token), None, "{token}");
        }
    }
}
