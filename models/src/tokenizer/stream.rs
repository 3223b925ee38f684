//! Tokens to text, one token at a time.

use super::pieces::Joining;
use super::{Tokenizer, TokenizerError};

/// Puts bytes together into text. What is certain is handed on at once: complete characters, and U+FFFD for a byte
/// that cannot be part of one (one for each maximal part of a character, as lossy decoding of the whole would do).
/// Only the beginning of a character waits, three bytes at most.
#[derive(Clone, Debug, Default)]
pub struct Utf8Assembler {
    waiting: Vec<u8>,
}

impl Utf8Assembler {
    /// Takes bytes and returns the text that is now certain.
    #[must_use]
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.waiting.extend_from_slice(bytes);
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.waiting.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let rest = chunk.invalid();
            if rest.is_empty() {
                continue;
            }
            let at_end = done + rest.len() == self.waiting.len();
            if at_end && str::from_utf8(rest).is_err_and(|e| e.error_len().is_none()) {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += rest.len();
        }
        self.waiting.drain(..done);
        text
    }

    /// The end of the text: U+FFFD if the beginning of a character is left over.
    #[must_use]
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.waiting).into_owned();
        self.waiting.clear();
        text
    }
}

/// Decodes a growing sequence. The pieces that [`push`](Self::push) returns and what [`finish`](Self::finish) adds
/// are, put together, the text of the whole sequence.
///
/// With the decoders of byte-level and of sentencepiece-style tokenizers a piece depends on nothing but the token's
/// bytes and the beginning of a character that waits. Any other decoder is asked again for the last few tokens with
/// each new one, and text that ends in U+FFFD waits.
#[derive(Clone, Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    assembler: Utf8Assembler,
    at_start: bool,
    /// Leading spaces that may still be dropped.
    strip: usize,
    window: Window,
}

impl<'a> TextStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool, continuing: bool) -> Self {
        let strip = match tokenizer.pieces.joining() {
            Joining::Bytes { strip } if !continuing => strip,
            _ => 0,
        };
        Self {
            tokenizer,
            skip_special,
            assembler: Utf8Assembler::default(),
            at_start: !continuing,
            strip,
            window: Window::default(),
        }
    }

    /// Takes the next token and returns the text that is now certain; often none.
    ///
    /// # Errors
    /// When a decoder of an unusual kind refuses the tokens.
    pub fn push(&mut self, id: u32) -> Result<String, TokenizerError> {
        let pieces = &self.tokenizer.pieces;
        if self.skip_special && pieces.is_special(id) {
            return Ok(String::new());
        }
        let mut bytes = pieces.bytes(id);
        match pieces.joining() {
            Joining::Library => return self.window.push(&self.tokenizer.inner, id, self.skip_special),
            Joining::Metaspace { replacement } => {
                if self.at_start
                    && !bytes.is_empty()
                    && let Some(token) = self.tokenizer.inner.id_to_token(id)
                {
                    self.at_start = false;
                    return Ok(self.assembler.push(token.replace(replacement, "").as_bytes()));
                }
            }
            Joining::Bytes { .. } => {
                while self.strip > 0 && !bytes.is_empty() {
                    let Some(rest) = bytes.strip_prefix(b" ") else {
                        self.strip = 0;
                        break;
                    };
                    (bytes, self.strip) = (rest, self.strip - 1);
                }
            }
        }
        Ok(self.assembler.push(bytes))
    }

    /// The end of the sequence: what still waited.
    #[must_use]
    pub fn finish(&mut self) -> String {
        match self.tokenizer.pieces.joining() {
            Joining::Library => self.window.finish(),
            _ => self.assembler.finish(),
        }
    }
}

/// The last tokens of a sequence whose decoder looks at neighbours: those handed on last, kept as context, and those
/// that wait.
#[derive(Clone, Debug, Default)]
struct Window {
    ids: Vec<u32>,
    /// How many of `ids` are handed on, and their text.
    context: usize,
    handed_on: String,
    waiting: String,
}

impl Window {
    fn push(
        &mut self,
        tokenizer: &tokenizers::Tokenizer,
        id: u32,
        skip_special: bool,
    ) -> Result<String, TokenizerError> {
        let decode = |ids: &[u32]| {
            let text = tokenizer.decode(ids, skip_special);
            text.map_err(|e| TokenizerError::Decode(e.to_string()))
        };
        self.ids.push(id);
        let text = decode(&self.ids)?;
        let common = text
            .char_indices()
            .zip(self.handed_on.chars())
            .find(|((_, a), b)| a != b)
            .map_or(self.handed_on.len().min(text.len()), |((at, _), _)| at);
        let new = text[common..].to_owned();
        if new.is_empty() || new.ends_with(char::REPLACEMENT_CHARACTER) {
            self.waiting = new;
            return Ok(String::new());
        }
        self.ids.drain(..self.context);
        self.context = self.ids.len();
        self.handed_on = decode(&self.ids)?;
        self.waiting.clear();
        Ok(new)
    }

    fn finish(&mut self) -> String {
        std::mem::take(self).waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any cut of any bytes gives the text of lossy decoding, and no piece waits longer than it must.
    #[test]
    fn every_cut_spells_the_same_text() {
        let samples: [&[u8]; 6] = [
            "aé✓😀\u{fffd}".as_bytes(),
            b"\xf0\x9f\x98",
            b"\xe0\x80\x80 \xc0\xaf \xed\xa0\x80",
            b"\xf0\x9f\xf0\x9f\x98\x80\xff",
            b"\x80\x80a\xc3",
            b"\xf4\x90\x80\x80\xe2\x82",
        ];
        for bytes in samples {
            let whole = String::from_utf8_lossy(bytes);
            for cuts in 0u32..1 << bytes.len().saturating_sub(1) {
                let (mut a, mut text, mut begin) = (Utf8Assembler::default(), String::new(), 0);
                for end in 1..=bytes.len() {
                    if end == bytes.len() || cuts >> (end - 1) & 1 == 1 {
                        text.push_str(&a.push(&bytes[begin..end]));
                        begin = end;
                        assert!(a.waiting.len() < 4, "{bytes:?} waits too long");
                    }
                }
                text.push_str(&a.finish());
                assert_eq!(text, whole, "{bytes:?} cut at {cuts:b}");
            }
        }
    }
}
