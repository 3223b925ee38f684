//! Text increments: stop strings that span tokens, held back until it is clear whether they occur.
//!
//! A stop string ends the answer and is not part of it. Text whose end could be the beginning of a stop string
//! is held back until more text decides; [`StopStrings::finish`] releases what is left when the answer ends
//! otherwise. What comes out does not depend on how the text was cut into pieces.

use thiserror::Error;

/// A stop string that would stop everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("a stop string is empty: every text would end at once")]
pub struct EmptyStopString;

/// Watches a text for stop strings.
#[derive(Clone, Debug, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

/// What [`StopStrings::push`] lets through.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Increment {
    /// Text that is certainly part of the answer.
    pub text: String,
    /// The stop string that ended it.
    pub stop: Option<String>,
}

impl StopStrings {
    /// Watches for any of `stops`.
    ///
    /// # Errors
    /// [`EmptyStopString`].
    pub fn new(stops: &[String]) -> Result<Self, EmptyStopString> {
        if stops.iter().any(String::is_empty) {
            return Err(EmptyStopString);
        }
        Ok(Self {
            stops: stops.to_vec(),
            held: String::new(),
            stopped: false,
        })
    }

    /// Adds a piece of text. The stop string that is complete first ends the answer (the longest of those that
    /// are complete at the same place), and the text ends where it begins; later pieces are dropped.
    pub fn push(&mut self, piece: &str) -> Increment {
        if self.stopped {
            return Increment::default();
        }
        let unseen = self.held.len();
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_match(unseen) {
            self.stopped = true;
            let mut text = std::mem::take(&mut self.held);
            text.truncate(start);
            return Increment {
                text,
                stop: Some(stop),
            };
        }
        let keep = self.undecided();
        let rest = self.held.split_off(self.held.len() - keep);
        Increment {
            text: std::mem::replace(&mut self.held, rest),
            stop: None,
        }
    }

    /// Releases the text held back: the answer has ended and no stop string will be completed.
    pub fn finish(&mut self) -> String {
        self.stopped = true;
        std::mem::take(&mut self.held)
    }

    /// Start and text of the match that ends first, of those that end after byte `unseen`.
    fn first_match(&self, unseen: usize) -> Option<(usize, String)> {
        let found = self.stops.iter().filter_map(|stop| {
            let from = floor_char_boundary(&self.held, unseen.saturating_sub(stop.len() - 1));
            let start = from + self.held[from..].find(stop.as_str())?;
            Some((start + stop.len(), start, stop))
        });
        found
            .min_by_key(|(end, start, _)| (*end, *start))
            .map(|(_, start, stop)| (start, stop.clone()))
    }

    /// Bytes of the longest end of the text that begins a stop string.
    fn undecided(&self) -> usize {
        let longest = |stop: &String| {
            let most = self.held.len().min(stop.len() - 1);
            (1..=most)
                .rev()
                .find(|n| stop.is_char_boundary(*n) && self.held.as_bytes().ends_with(&stop.as_bytes()[..*n]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}

fn floor_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, Vec<String>, Option<String>) {
        let stops: Vec<String> = stops.iter().map(ToString::to_string).collect();
        let mut watch = StopStrings::new(&stops).expect("no stop string is empty");
        let mut text = String::new();
        let mut steps = Vec::new();
        for piece in pieces {
            let increment = watch.push(piece);
            text.push_str(&increment.text);
            steps.push(increment.text);
            if increment.stop.is_some() {
                return (text, steps, increment.stop);
            }
        }
        text.push_str(&watch.finish());
        (text, steps, None)
    }

    #[test]
    fn text_flows_through_when_nothing_could_stop_it() {
        let (text, steps, stop) = run(&["END"], &["a", "b", "cd"]);
        assert_eq!((text.as_str(), stop), ("abcd", None));
        assert_eq!(steps, ["a", "b", "cd"]);
    }

    #[test]
    fn a_stop_string_across_pieces_never_shows() {
        let (text, steps, stop) = run(&["\n\nUser:"], &["Hello.", "\n", "\n", "Us", "er", ": again"]);
        assert_eq!((text.as_str(), stop.as_deref()), ("Hello.", Some("\n\nUser:")));
        assert_eq!(steps, ["Hello.", "", "", "", "", ""]);
    }

    #[test]
    fn a_beginning_that_comes_to_nothing_is_released() {
        let (text, steps, stop) = run(&["abcd"], &["xab", "c", "e", "ab"]);
        assert_eq!((text.as_str(), stop), ("xabceab", None));
        assert_eq!(steps, ["x", "", "abce", ""]);
    }

    #[test]
    fn a_beginning_inside_a_beginning_is_found() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b", "c"]).0, "a");
        assert_eq!(run(&["abab", "bb"], &["ab", "ab"]).0, "");
    }

    #[test]
    fn the_first_to_be_complete_wins_and_the_longest_of_equals() {
        assert_eq!(run(&["cd", "bcde"], &["abcdef"]).2.as_deref(), Some("cd"));
        assert_eq!(
            run(&["cd", "bcd"], &["abcdef"]),
            ("a".into(), vec!["a".into()], Some("bcd".into()))
        );
    }

    #[test]
    fn characters_of_several_bytes_stay_whole() {
        let (text, steps, _) = run(&["éß", "日本"], &["é", "日", "x", "日", "本語"]);
        assert_eq!(text, "é日x");
        assert_eq!(steps, ["", "é", "日x", "", ""]);
    }

    #[test]
    fn an_empty_stop_string_is_refused() {
        assert_eq!(
            StopStrings::new(&["a".into(), String::new()]).err(),
            Some(EmptyStopString)
        );
    }

    proptest! {
        /// The same text, cut differently, gives what a search in the whole text gives.
        #[test]
        fn cutting_changes_nothing(
            text in "[abé]{0,24}",
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let ends = stops.iter().filter_map(|s| text.find(s.as_str()).map(|at| (at + s.len(), at, s)));
            let want = ends.min().map_or((text.as_str(), None), |(_, at, s)| (&text[..at], Some(s.clone())));
            let chars: Vec<char> = text.chars().collect();
            let mut at: Vec<usize> = cuts.iter().map(|c| c.index(chars.len() + 1)).collect();
            at.extend([0, chars.len()]);
            at.sort_unstable();
            let pieces: Vec<String> = at.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (got, _, stop) = run(&stops, &pieces);
            prop_assert_eq!((got.as_str(), stop), want);
        }
    }
}
