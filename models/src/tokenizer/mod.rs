//! Text to token ids and back.
//!
//! Encoding is the `tokenizers` crate's, as `tokenizer.json` describes it: special tokens that stand in the text are
//! recognised there, and the file's post-processor adds its own when asked. Decoding goes through bytes: each token
//! stands for a run of bytes ([`Tokenizer::token_bytes`]), and text is what those bytes spell, so that a stream
//! ([`TextStream`]) can hand on every character as soon as it is complete and never a part of one.

mod pieces;
mod stream;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::Deserialize;
use serde::de::IgnoredAny;
use thiserror::Error;

use self::pieces::Pieces;
pub use self::stream::{TextStream, Utf8Assembler};

/// Largest token id accepted, so that a table over all ids has a sane size.
pub const MAX_TOKEN_ID: u32 = (1 << 24) - 1;

/// Why a `tokenizer.json` cannot be used, or a text not be encoded.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum TokenizerError {
    /// A file of no bytes.
    #[error("tokenizer.json: the file is empty (0 bytes); download it again")]
    Empty,
    /// Not JSON: cut off, or another format (a `tokenizer.model` of sentencepiece, say).
    #[error("tokenizer.json: not valid JSON ({0}); the file may be cut off or of another format")]
    Json(String),
    /// JSON, but no tokenizer that this version of the format describes.
    #[error("tokenizer.json: not a usable tokenizer: {0}")]
    Invalid(String),
    /// An id so large that it cannot be meant.
    #[error("tokenizer.json: token id {0} is out of range (at most {MAX_TOKEN_ID})")]
    IdOutOfRange(u32),
    /// The text could not be turned into tokens.
    #[error("cannot encode the text: {0}")]
    Encode(String),
    /// A decoder of an unusual kind refused the ids.
    #[error("cannot decode the tokens: {0}")]
    Decode(String),
}

/// A loaded `tokenizer.json`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pieces: Pieces,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("ids", &self.pieces.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads the bytes of a `tokenizer.json`. Truncation and padding that it may ask for are ignored.
    ///
    /// # Errors
    /// An empty file, invalid JSON, or a tokenizer that the `tokenizers` crate does not accept.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TokenizerError> {
        if bytes.is_empty() {
            return Err(TokenizerError::Empty);
        }
        check_json(bytes)?;
        // The crate panics on a few malformed components instead of returning an error.
        let mut inner = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(bytes)))
            .map_err(|_| TokenizerError::Invalid("a component has an unknown form".to_owned()))?
            .map_err(|e| TokenizerError::Invalid(e.to_string()))?;
        inner.with_padding(None);
        inner
            .with_truncation(None)
            .map_err(|e| TokenizerError::Invalid(e.to_string()))?;
        let pieces = Pieces::new(&inner)?;
        Ok(Self { inner, pieces })
    }

    /// Encodes a text. Special tokens that are spelled out in it become their ids. With `add_special` the
    /// tokenizer's post-processor adds what it adds to a prompt (a beginning-of-sequence token, say).
    ///
    /// # Errors
    /// When the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, add_special);
        Ok(encoding
            .map_err(|e| TokenizerError::Encode(e.to_string()))?
            .get_ids()
            .to_vec())
    }

    /// The text of a whole sequence: bytes that are not UTF-8 become U+FFFD, ids that stand for nothing are passed
    /// over, and special tokens are spelled out unless `skip_special`.
    ///
    /// # Errors
    /// Only for a decoder of an unusual kind (see [`TextStream`]).
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TokenizerError> {
        let mut stream = self.stream(skip_special);
        let mut text = String::new();
        for id in ids {
            text.push_str(&stream.push(*id)?);
        }
        text.push_str(&stream.finish());
        Ok(text)
    }

    /// Decodes token by token, from the beginning of a text.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TextStream<'_> {
        TextStream::new(self, skip_special, false)
    }

    /// Decodes token by token what continues a text: a leading space that a sentencepiece-style tokenizer drops at
    /// the beginning of a text is kept.
    #[must_use]
    pub fn continuation(&self, skip_special: bool) -> TextStream<'_> {
        TextStream::new(self, skip_special, true)
    }

    /// The bytes that a token stands for within a text; empty for an id beyond the vocabulary. A special token stands
    /// for its own spelling.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.bytes(id)
    }

    /// Whether a token is special: control rather than text.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The id of the token with exactly this spelling in the vocabulary.
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// One more than the largest token id. A model can have more logits than that.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }
}

/// Reads the file once as plain JSON: the `tokenizers` crate reports syntax errors in some parts only by a panic.
fn check_json(bytes: &[u8]) -> Result<(), TokenizerError> {
    #[derive(Deserialize)]
    struct Outline {
        #[serde(rename = "model")]
        _model: Option<IgnoredAny>,
    }
    match serde_json::from_slice::<Outline>(bytes) {
        Ok(Outline { _model: Some(_) }) => Ok(()),
        Ok(Outline { _model: None }) => Err(TokenizerError::Invalid("it has no \"model\"".to_owned())),
        Err(e) if e.is_data() => Err(TokenizerError::Invalid(e.to_string())),
        Err(e) => Err(TokenizerError::Json(e.to_string())),
    }
}
