//! Pieces of maps, read from the store.

use vellum_io::Result;

use crate::codec::damaged;
use crate::codec::manifest::PieceRef;
use crate::codec::piece::Piece;
use crate::names;
use crate::repository::Repository;

/// Reads a piece of `chunks` chunks.
///
/// # Errors
/// If it is not what its manifest says, and what the store says.
pub(crate) async fn load(repository: &Repository, at: &PieceRef, chunks: u64) -> Result<Piece> {
    let key = names::part(names::MAPS, at.push, at.part);
    let end = at.offset_bytes.saturating_add(at.len_bytes);
    let range = at.offset_bytes..end;
    let bytes = repository.objects().get_range(&key, range).await?;
    let piece = match *blake3::hash(&bytes).as_bytes() == at.hash.0 {
        true => Piece::decode(&bytes, chunks),
        false => Err(damaged("a map that is not what was written")),
    };
    piece.map_err(|error| repository.at(error, &key))
}
