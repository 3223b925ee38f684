//! `horizon chat`: a conversation.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::atomic::Ordering;

use horizon_models::chat::{ChatTemplate, Message, RenderOptions};
use horizon_runtime::engine::OpenTimings;
use horizon_runtime::residency::{Residency, ResidencyReport};
use horizon_runtime::session::{Answer, Request, Session, StopReason};
use horizon_runtime::text::TextFiles;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use serde::Serialize;

use super::model;
use super::report::{ResolvedPlan, TimingReport, residency_line, summary};
use crate::args::ChatArgs;
use crate::interrupt::Work;
use crate::output::{CliError, Output, write_stdout};
use crate::resolve::{GenerationPlan, ModelPlace, engine_options, generation};

/// The line that `--json` prints for each turn.
#[derive(Serialize)]
struct TurnReport<'a> {
    turn: u64,
    /// Of this turn: the seed of the settings plus the turn.
    seed: u64,
    user: &'a str,
    text: &'a str,
    prompt_ids: &'a [u32],
    token_ids: &'a [u32],
    stop_reason: StopReason,
    stop_string: Option<&'a str>,
    timings: TimingReport,
    /// Counted since the first turn.
    #[serde(flatten)]
    residency: ResidencyReport,
    settings: &'a ResolvedPlan,
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
    let (engine, text) = model::load(source, &options, &bar)?;
    drop(bar);
    let plan = generation(&args.generate, &text.generation)?;
    let mut conversation = Conversation {
        out,
        template: text.chat_template()?,
        resolved: ResolvedPlan::new(&engine, &plan, true, false),
        open: engine.timings(),
        residency: engine.residency(),
        session: engine.into_session(),
        text: &text,
        plan,
        system: args.system,
        messages: Vec::new(),
        turn: 0,
    };
    conversation.reset();
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
    resolved: ResolvedPlan,
    open: OpenTimings,
    residency: Residency,
    session: Session,
    text: &'a TextFiles,
    plan: GenerationPlan,
    system: Option<String>,
    messages: Vec<Message>,
    turn: u64,
}

impl Conversation<'_> {
    fn reset(&mut self) {
        self.messages = self.system.iter().map(|s| Message::new("system", s)).collect();
        self.session.reset();
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
    fn seed(&self) -> u64 {
        self.plan.sampling.seed.wrapping_add(self.turn)
    }

    fn generate(&mut self) -> Result<(Vec<u32>, Answer), CliError> {
        let rendered = self.template.render(&self.messages, &RenderOptions::answer())?;
        let mut sampling = self.plan.sampling;
        sampling.seed = self.seed();
        let request = Request {
            prompt: self.text.tokenizer.encode(&rendered, false)?,
            sampling,
            max_tokens: self.plan.max_tokens,
            stop: self.plan.stop.clone(),
            eos: self.plan.eos_token_ids.clone(),
        };
        let (out, work) = (self.out, Work::begin());
        let mut decoder = self.text.tokenizer.continuation(true);
        let mut printed = Ok(());
        let answer = self
            .session
            .generate(&request, &mut decoder, work.cancel(), &mut |piece| {
                if !out.is_json() && printed.is_ok() {
                    printed = write_stdout(piece);
                    work.cancel().fetch_or(printed.is_err(), Ordering::SeqCst);
                }
            });
        printed?;
        Ok((request.prompt, answer?))
    }

    fn report(&self, user: &str, prompt: &[u32], answer: &Answer) -> Result<(), CliError> {
        let report = TurnReport {
            turn: self.turn,
            seed: self.seed(),
            user,
            text: &answer.text,
            prompt_ids: prompt,
            token_ids: &answer.token_ids,
            stop_reason: answer.stop,
            stop_string: answer.stop_string.as_deref(),
            timings: TimingReport::new(self.open, answer, prompt.len()),
            residency: ResidencyReport::new(self.resolved.engine(), &self.residency),
            settings: &self.resolved,
        };
        self.out.result(&report, || {
            if answer.text.ends_with('\n') {
                String::new()
            } else {
                "\n".into()
            }
        })?;
        self.out.note(&summary(answer, prompt.len(), None));
        if let Some(line) = residency_line(&report.residency) {
            self.out.note(&line);
        }
        Ok(())
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
