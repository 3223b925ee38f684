//! The text side of a model: tokenizer, chat template, generation defaults.

use std::path::PathBuf;

use horizon_models::chat::{ChatError, ChatFiles, ChatTemplate};
use horizon_models::generation::{GenerationConfig, GenerationError};
use horizon_models::source::{ModelSource, OpenError};
use horizon_models::tokenizer::{TextStream, Tokenizer, TokenizerError};
use thiserror::Error;

use crate::session::{TextDecoder, TextError};

/// A model whose text files cannot be used.
#[derive(Debug, Error)]
pub enum TextFilesError {
    /// A file cannot be read.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// There is no tokenizer that this program reads.
    #[error("{}: there is no tokenizer.json{hint}", place.display())]
    NoTokenizer {
        /// The model.
        place: PathBuf,
        /// What is there instead.
        hint: &'static str,
    },
    /// The tokenizer.
    #[error("{}: {source}", place.display())]
    Tokenizer {
        /// The model.
        place: PathBuf,
        /// Why.
        source: TokenizerError,
    },
    /// The tokenizer has tokens that the model does not know.
    #[error(
        "{}: tokenizer.json has token ids up to {largest}, but the model knows only {vocab} (vocab_size of config.json): \
         it belongs to another model, or tokens were added without resizing the model; take both from one repository",
        place.display()
    )]
    Vocabulary {
        /// The model.
        place: PathBuf,
        /// Largest id of a token.
        largest: usize,
        /// Rows of the embedding table.
        vocab: usize,
    },
    /// The chat template, or the files around it.
    #[error("{}: {source}", place.display())]
    Chat {
        /// The model.
        place: PathBuf,
        /// Why.
        source: ChatError,
    },
    /// The generation defaults.
    #[error("{}: {source}", place.display())]
    Generation {
        /// The model.
        place: PathBuf,
        /// Why.
        source: GenerationError,
    },
}

/// Loads the tokenizer of a model.
///
/// # Errors
/// [`TextFilesError`] naming the model and the file.
pub fn tokenizer(source: &ModelSource) -> Result<Tokenizer, TextFilesError> {
    let place = || source.place().to_owned();
    let Some(bytes) = source.file("tokenizer.json")? else {
        let hint = match source.file("tokenizer.model")? {
            Some(_) => "; tokenizer.model alone is not read: convert it with Hugging Face's transformers",
            None => "; copy it from the model's repository",
        };
        return Err(TextFilesError::NoTokenizer { place: place(), hint });
    };
    let tokenizer = Tokenizer::from_bytes(&bytes).map_err(|source| TextFilesError::Tokenizer {
        place: place(),
        source,
    })?;
    let vocab = source.spec().vocab;
    if tokenizer.vocab_size() > vocab {
        return Err(TextFilesError::Vocabulary {
            place: place(),
            largest: tokenizer.vocab_size() - 1,
            vocab,
        });
    }
    Ok(tokenizer)
}

/// Tokenizer and generation defaults, and the files of the chat template.
#[derive(Debug)]
pub struct TextFiles {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// How the model's makers want it sampled.
    pub generation: GenerationConfig,
    place: PathBuf,
    template: [Option<Vec<u8>>; 3],
}

impl TextFiles {
    /// Loads them.
    ///
    /// # Errors
    /// [`TextFilesError`] naming the model and the file.
    pub fn load(source: &ModelSource) -> Result<Self, TextFilesError> {
        let place = source.place().to_owned();
        let tokenizer = tokenizer(source)?;
        let template = [
            source.file("chat_template.jinja")?,
            source.file("tokenizer_config.json")?,
            source.file("special_tokens_map.json")?,
        ];
        // Only the last resort for the end of text: files that say nothing else are no reason to refuse the model.
        let eos = chat_files(&template).special_token("eos_token").ok().flatten();
        let eos = eos.and_then(|token| tokenizer.token_to_id(&token));
        let file = source.file("generation_config.json")?;
        let generation =
            GenerationConfig::from_files(file.as_deref(), source.config(), eos).map_err(|source| {
                TextFilesError::Generation {
                    place: place.clone(),
                    source,
                }
            })?;
        Ok(Self {
            tokenizer,
            generation,
            place,
            template,
        })
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`TextFilesError::Chat`] when there is none or it cannot be used.
    pub fn chat_template(&self) -> Result<ChatTemplate, TextFilesError> {
        ChatTemplate::from_files(&chat_files(&self.template)).map_err(|source| TextFilesError::Chat {
            place: self.place.clone(),
            source,
        })
    }
}

fn chat_files(files: &[Option<Vec<u8>>; 3]) -> ChatFiles<'_> {
    let [chat_template, tokenizer_config, special_tokens_map] = files.each_ref().map(Option::as_deref);
    ChatFiles {
        chat_template,
        tokenizer_config,
        special_tokens_map,
    }
}

impl TextDecoder for TextStream<'_> {
    fn push(&mut self, token: u32) -> Result<String, TextError> {
        self.push(token).map_err(|e| TextError(e.to_string()))
    }

    fn finish(&mut self) -> Result<String, TextError> {
        Ok(self.finish())
    }
}
