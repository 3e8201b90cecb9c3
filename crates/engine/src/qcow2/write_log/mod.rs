//! The write log: what the guest wrote before a flush is made durable with one append to
//! another file, or to clusters of the image that are its own, and reaches the image later
//! (FORMAT.md, section 7b).
//!
//! | file | what it does |
//! | --- | --- |
//! | [`ring`] | where in the log the next batch goes, and what may be overwritten |
//! | [`pending`] | the changes since the last flush, and the batch that they make |
//! | [`live`] | of which parts of the disk there are live records |
//! | [`overlaps`] | which requests ran beside changes that are not noted, and are not either |
//! | [`log`] | the state of a log in use; its superblocks and appends |
//! | [`requests`] | guest requests, which note what they change |
//! | [`flush`] | a flush: by an append, or by a commit of the image; the log's tail follows |
//! | [`options`] | which log an image is to get |
//! | [`attach`] | takes a log into use, and ends that |
//! | [`inside`] | a log in clusters of the image itself |
//! | [`ring_reader`] | records of a ring as they are read after a crash |
//! | [`replay`] | what a log holds, after a crash, and how it comes back into the image |
//!
//! A write is done to the image as without a log, where it waits in caches. What is small is
//! noted besides, and the next flush appends all notes with one durable write: it waits for no
//! copy, no table and no barrier. Where all of it is in place already, a barrier does instead.
//! Where something was changed that is not noted (a large write, a discard of much), that flush
//! commits the image, as without a log, and says in the log that nothing in it counts any more.
//!
//! Invariants, by the rules of FORMAT.md:
//! - Whatever a flush called durable is in the image durably, or in a live record (W1).
//! - Requests that overlap are noted in the order in which the image got them, or not at all (W2).
//! - A record is live until a commit of the image that began after its change has succeeded
//!   (W3). After a flush that went past the log, none is live (W4).
//! - The incompatible bit is durable before the first append, and goes only when no record is
//!   live and the image has everything durably (W5).
//! - A replay, and taking a log into use and giving it up, go on where a crash ended them (W6, W7).
//! - Batches are appended one by one, and one that may be there in part is not followed by
//!   another (W8).
//! - Whoever changes what the guest sees, or the size, other than by a guest's request, suspends
//!   the log first (W9): see [`crate::qcow2::Qcow2`]'s `change`.

pub(crate) mod attach;
mod flush;
mod inside;
mod live;
pub(crate) mod log;
mod options;
mod overlaps;
mod pending;
pub(crate) mod replay;
mod requests;
mod ring;
mod ring_reader;

pub use options::WriteLogOptions;
