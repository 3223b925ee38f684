//! Chat templates: a conversation as the text that an instruct model was trained on.
//!
//! Templates are Jinja in the dialect that Hugging Face transformers gives them: blocks are trimmed as with
//! `trim_blocks` and `lstrip_blocks`, loops have `break` and `continue`, `tojson` writes plain JSON, strings and maps
//! have Python's methods, and `raise_exception` and `strftime_now` are there. The special tokens of
//! `tokenizer_config.json` (else of `special_tokens_map.json`) are variables; those that a model lacks are undefined.
//!
//! A template comes with the model, so its work is bounded: [`FUEL`] steps, and [`MAX_OUTPUT`] bytes of text.

mod dialect;
mod files;

use std::collections::BTreeMap;
use std::error::Error as _;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment, ErrorKind};
use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use self::files::ChatFiles;

/// Steps that rendering may take: instructions, and one for each 64 bytes made.
pub const FUEL: u64 = 16_000_000;
/// Most bytes of rendered text; far beyond any model's context.
pub const MAX_OUTPUT: usize = 16 << 20;

const NAME: &str = "chat template";

/// Why a conversation cannot be rendered.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ChatError {
    /// The model is not an instruct model.
    #[error("the model has no chat template, so it cannot chat; `run --raw` gives it the text as it is")]
    NoTemplate,
    /// One of the tokenizer's files cannot be read.
    #[error("{file}: {problem}")]
    File {
        /// Name of the file.
        file: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// The template is not valid in the dialect.
    #[error("the model's chat template cannot be used: {0}")]
    Syntax(String),
    /// The template itself refused the conversation.
    #[error("the model's chat template refuses the conversation: {0}")]
    Refused(String),
    /// The template failed.
    #[error("the model's chat template failed: {0}")]
    Render(String),
    /// The template ran into a bound.
    #[error("the model's chat template was stopped: {0}")]
    Bound(String),
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A turn of `role`.
    #[must_use]
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

/// What a template is given beside the messages.
#[derive(Clone, Debug, Default)]
pub struct RenderOptions {
    /// Ends the text with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Further variables (`enable_thinking`, `tools`), which win over all others.
    pub variables: serde_json::Map<String, serde_json::Value>,
    /// The time that `strftime_now` writes, in UTC; now if `None`.
    pub now: Option<SystemTime>,
}

impl RenderOptions {
    /// The options for asking the model to answer.
    #[must_use]
    pub fn answer() -> Self {
        Self {
            add_generation_prompt: true,
            ..Self::default()
        }
    }
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, Value>,
}

impl ChatTemplate {
    /// The chat template among a checkpoint's files.
    ///
    /// # Errors
    /// [`ChatError::NoTemplate`] where there is none; a file that is not what it should be; an invalid template.
    pub fn from_files(files: &ChatFiles<'_>) -> Result<Self, ChatError> {
        let found = files.read()?;
        Self::new(
            &found.template.ok_or(ChatError::NoTemplate)?,
            found.special_tokens,
        )
    }

    /// Compiles a template with the given special tokens (`bos_token`, `eos_token`, …) as variables.
    ///
    /// # Errors
    /// When it is not valid.
    pub fn new(
        source: &str,
        special_tokens: impl IntoIterator<Item = (String, serde_json::Value)>,
    ) -> Result<Self, ChatError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(|e| ChatError::Syntax(e.to_string()))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment.set_debug(false);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        dialect::install(&mut environment);
        environment
            .add_template_owned(NAME, dialect::plain_blocks(source))
            .map_err(|e| ChatError::Syntax(e.to_string()))?;
        let special_tokens = special_tokens
            .into_iter()
            .map(|(name, v)| (name, Value::from(Serde(v))))
            .collect();
        Ok(Self {
            environment,
            special_tokens,
        })
    }

    /// Renders a conversation. Messages are usually [`Message`]s, but can be anything that serializes to maps.
    ///
    /// # Errors
    /// When the template refuses the conversation, fails, or runs into a bound.
    pub fn render<M: Serialize>(&self, messages: &[M], options: &RenderOptions) -> Result<String, ChatError> {
        let mut variables = self.special_tokens.clone();
        let mut set = |name: &str, value: Value| variables.insert(name.to_owned(), value);
        set("messages", Value::from(Serde(messages)));
        set(
            "add_generation_prompt",
            Value::from(options.add_generation_prompt),
        );
        set("tools", Value::from(()));
        set("documents", Value::from(()));
        set("strftime_now", dialect::strftime_now(options.now));
        for (name, value) in &options.variables {
            set(name, Value::from(Serde(value)));
        }
        let template = self.environment.get_template(NAME).map_err(|e| failure(&e))?;
        let text = template.render(variables).map_err(|e| failure(&e))?;
        if text.len() > MAX_OUTPUT {
            return Err(ChatError::Bound(format!(
                "the text is longer than {MAX_OUTPUT} bytes"
            )));
        }
        Ok(text)
    }
}

fn failure(error: &minijinja::Error) -> ChatError {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(dialect::Raised(message)) = cause.downcast_ref() {
            return ChatError::Refused(message.clone());
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Bound(format!("it took more than {FUEL} steps")),
        _ => ChatError::Render(error.to_string()),
    }
}
