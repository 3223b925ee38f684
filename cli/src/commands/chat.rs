//! `horizon chat`: a conversation.

use std::io::{self, BufRead, IsTerminal, Write};

use horizon_models::chat::{ChatTemplate, Message, RenderOptions};
use horizon_runtime::session::Answer;
use horizon_runtime::text::TextFiles;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde::Serialize;

use super::answer::{AnswerReport, Answerer};
use super::model;
use crate::args::ChatArgs;
use crate::output::{CliError, Output};
use crate::resolve::{ModelPlace, engine_options, generation};

/// The line that `--json` prints for each turn.
#[derive(Serialize)]
struct TurnReport<'a> {
    turn: u64,
    /// Of this turn: the seed of the settings plus the turn.
    seed: u64,
    user: &'a str,
    #[serde(flatten)]
    answer: &'a AnswerReport<'a>,
}

/// Talks until the input ends.
pub fn chat(args: ChatArgs) -> Result<(), CliError> {
    let out = Output::new(args.output);
    let options = engine_options(&args.model.execution)?;
    generation(
        &args.generate,
        &horizon_models::generation::GenerationConfig::default(),
    )?;
    let bar = out.progress();
    let source = model::open(&ModelPlace::of(args.model.model.as_deref()), &bar)?;
    let prepare = |text: &TextFiles| {
        let plan = generation(&args.generate, &text.generation)?;
        Ok((plan, text.chat_template()?))
    };
    let (engine, text, (plan, template)) = model::load(source, &options, &bar, prepare)?;
    drop(bar);
    let first_seed = plan.sampling.seed;
    let mut conversation = Conversation {
        out,
        template,
        answerer: Answerer::new(engine, &text, plan, (true, false), out),
        text: &text,
        first_seed,
        system: args.system,
        messages: Vec::new(),
        turn: 0,
    };
    conversation.reset();
    if let Some(seed) = conversation.answerer.seed() {
        out.note(&format!("seed {seed} (turn n draws with the seed plus n)"));
    }
    let mut input = Input::new()?;
    while let Some(line) = input.next()? {
        match line.trim() {
            "" => {}
            "/exit" | "/quit" => break,
            "/reset" => conversation.reset(),
            line if line.starts_with('/') => {
                out.note(&format!("{line}: unknown; there are /reset and /exit"));
            }
            _ => match conversation.answer(&line) {
                // Somebody at a keyboard can shorten the question or reset; a script cannot.
                Err(CliError::Failed(e)) if input.is_interactive() => out.note(&format!("error: {e}")),
                done => done?,
            },
        }
    }
    Ok(())
}

struct Conversation<'a> {
    out: Output,
    template: ChatTemplate,
    answerer: Answerer<'a>,
    text: &'a TextFiles,
    first_seed: u64,
    system: Option<String>,
    messages: Vec<Message>,
    turn: u64,
}

impl Conversation<'_> {
    fn reset(&mut self) {
        self.messages = self.system.iter().map(|s| Message::new("system", s)).collect();
        self.answerer.session.reset();
    }

    /// One turn. A turn that fails leaves no trace in the conversation.
    fn answer(&mut self, line: &str) -> Result<(), CliError> {
        self.messages.push(Message::new("user", line));
        match self.generate() {
            Ok((prompt, answer)) => {
                self.messages.push(Message::new("assistant", &answer.text));
                self.report(line, &prompt, &answer)?;
                self.turn += 1;
                Ok(())
            }
            Err(error) => {
                self.messages.pop();
                Err(error)
            }
        }
    }

    /// Each turn has draws of its own, or the same question would always have the same answer.
    fn generate(&mut self) -> Result<(Vec<u32>, Answer), CliError> {
        let rendered = self.template.render(&self.messages, &RenderOptions::answer())?;
        let prompt = self.text.tokenizer.encode(&rendered, false)?;
        let answer = self.answerer.generate(&prompt, self.turn)?;
        Ok((prompt, answer))
    }

    fn report(&self, user: &str, prompt: &[u32], answer: &Answer) -> Result<(), CliError> {
        let report = self.answerer.report(prompt, answer);
        let object = TurnReport {
            turn: self.turn,
            seed: self.first_seed.wrapping_add(self.turn),
            user,
            answer: &report,
        };
        report.print(&object, answer, None, self.out)
    }
}

/// Lines from an editor at a terminal, or from what is piped in.
enum Input {
    Editor(Box<DefaultEditor>),
    Pipe(io::StdinLock<'static>),
}

impl Input {
    fn new() -> Result<Self, CliError> {
        if io::stdin().is_terminal() && io::stderr().is_terminal() {
            let _ = writeln!(
                io::stderr(),
                "Ctrl-C stops an answer; /reset begins anew; Ctrl-D or /exit ends."
            );
            return Ok(Self::Editor(Box::new(DefaultEditor::new()?)));
        }
        Ok(Self::Pipe(io::stdin().lock()))
    }

    fn is_interactive(&self) -> bool {
        matches!(self, Self::Editor(_))
    }

    /// The next line without its line break, `None` at the end.
    fn next(&mut self) -> Result<Option<String>, CliError> {
        match self {
            Self::Editor(editor) => loop {
                match editor.readline("> ") {
                    Ok(line) => {
                        // A line that cannot be remembered can still be answered.
                        let _ = editor.add_history_entry(&line);
                        return Ok(Some(line));
                    }
                    Err(ReadlineError::Interrupted) => {}
                    Err(ReadlineError::Eof) => return Ok(None),
                    Err(e) => return Err(e.into()),
                }
            },
            Self::Pipe(stdin) => {
                let mut line = Vec::new();
                if stdin.read_until(b'\n', &mut line)? == 0 {
                    return Ok(None);
                }
                let line = String::from_utf8(line).map_err(|_| CliError::failed("stdin: not UTF-8 text"))?;
                Ok(Some(line.trim_end_matches(['\n', '\r']).to_owned()))
            }
        }
    }
}
